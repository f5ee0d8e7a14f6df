"""`math`: 1 if the response's last answer has the value of the label (math-verify).

Comparing expressions can take for ever and exhaust memory, so it happens in worker processes that have a
deadline for every sample and are replaced when they die.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Literal

from relax_cli.data.rewards.math_answers import compare
from relax_cli.data.rewards.types import RewardInput, RewardResult
from relax_cli.errors import RunError, problem_kind

log = logging.getLogger(__name__)

Verdict = Literal["right", "wrong", "bad-label", "timed-out", "died"]
MOST_WORKERS = 4

MATH_LABEL = problem_kind("math-label", "Reward", "During the run, math-verify found no mathematics in a label.")
MATH_WORKER = problem_kind("math-worker", "Reward", "A worker process of the math reward does not start.")


class MathReward:
    """Judges batches in a pool of processes, which starts with the first batch.

    Parts: `correct`, and `unjudged` (reward 0) where the deadline passed or the worker died twice.
    """

    def __init__(self, *, deadline: float = 5.0, workers: int | None = None) -> None:
        self._deadline = deadline
        self._size = workers or min(MOST_WORKERS, os.cpu_count() or 1)
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    def __call__(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        """Judge a batch.

        Raises:
            RunError: a sample has no label, or one that is not mathematics.
        """
        labels = [sample.required_label("math") for sample in samples]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._size, thread_name_prefix="math-reward")
            for _ in range(self._size):
                self._idle.put(_Worker(self._deadline))
        responses = [sample.response for sample in samples]
        verdicts = list(self._threads.map(self._judge, labels, responses))
        return [_result(sample, verdict) for sample, verdict in zip(samples, verdicts, strict=True)]

    def close(self) -> None:
        """End the workers; the next batch would start new ones."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
            for _ in range(self._size):
                self._idle.get().stop()

    def _judge(self, label: str, response: str) -> Verdict:
        worker = self._idle.get()
        try:
            verdict = worker.judge(label, response)
            if verdict == "died":
                worker = worker.replacement()
                verdict = worker.judge(label, response)
            if verdict in ("died", "timed-out"):
                worker = worker.replacement()
            return verdict
        finally:
            self._idle.put(worker)


def _result(sample: RewardInput, verdict: Verdict) -> RewardResult:
    if verdict == "bad-label":
        raise RunError(
            MATH_LABEL(
                "math-verify finds no mathematics in the label",
                where=sample.describe(),
                got=repr(sample.label),
                expected="a number, LaTeX or a word",
                fix="correct the label, or --rm-type exact",
            )
        )
    unjudged = verdict in ("timed-out", "died")
    if unjudged:
        log.warning("math reward %s, scored 0: %s", verdict, sample.describe())
    correct = float(verdict == "right")
    return RewardResult(correct, {"correct": correct, "unjudged": float(unjudged)})


def _does_not_start() -> RunError:
    fix = "see its traceback above; python -c 'import math_verify' must work"
    return RunError(MATH_WORKER("the worker process of the math reward does not start", fix=fix))


class _Worker:
    """One process that judges one response at a time."""

    def __init__(self, deadline: float) -> None:
        # Forking a process with threads (torch, gloo, Ray) can deadlock the child.
        context = multiprocessing.get_context("spawn")
        self._deadline = deadline
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_end, deadline), daemon=True)
        self._process.start()
        child_end.close()
        self._ready = False

    def judge(self, label: str, response: str) -> Verdict:
        self._await_start()
        try:
            self._pipe.send((label, response))
            verdict: Verdict = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            return "timed-out" if self._process.exitcode == -signal.SIGALRM else "died"
        return verdict

    def _await_start(self) -> None:
        if not self._ready:
            try:
                self._ready = self._pipe.recv() == "ready"
            except (EOFError, OSError) as error:
                raise _does_not_start() from error

    def replacement(self) -> _Worker:
        self.stop()
        return _Worker(self._deadline)

    def stop(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, deadline: float) -> None:
    import math_verify  # noqa: F401 - takes seconds, which no sample should pay for

    # Ctrl-C reaches the whole process group; the parent decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # math-verify warns once that it keeps no deadline itself.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    pipe.send("ready")
    while True:
        try:
            label, response = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        # The alarm's default action ends this process, even inside C code, and when the parent is long gone.
        signal.setitimer(signal.ITIMER_REAL, deadline)
        verdict = compare(label, response)
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send(verdict)
