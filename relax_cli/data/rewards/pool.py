"""Rewards that judge one sample at a time in worker processes, which have a deadline and are replaced when they die.

For what can take for ever or exhaust memory in code that no exception stops: sympy, regular expressions, programs.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import Literal

from relax_cli.data.rewards.types import REWARD, JudgesAhead, RewardInput, RewardResult
from relax_cli.errors import RunError, problem_kind

log = logging.getLogger(__name__)

Verdict = float | dict[str, float] | RunError | Literal["timed-out", "died"]
UNJUDGED = "unjudged"
MOST_WORKERS = 4
WORKER = problem_kind("reward-worker", "Reward", "A worker process of a built-in reward does not start.")


class PooledReward(JudgesAhead):
    """Judges batches in a pool of processes, which starts with the first batch.

    The part `unjudged` is 1, and the reward 0, where the deadline passed or the worker died twice.
    """

    def __init__(
        self, name: str, function: str, parts: Sequence[str] = (), *, deadline: float = 5.0, workers: int | None = None
    ) -> None:
        """`function` is `"module:function"`, from a sample to its score, or a class of such; `parts` are what it makes
        besides the reward; the deadline of a sample is in seconds."""
        self._unjudged = dict.fromkeys(parts, 0.0) | {UNJUDGED: 1.0}
        self._name = name
        self._start = partial(_Worker, name, function, deadline)
        self._size = workers or min(MOST_WORKERS, os.cpu_count() or 1)
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None
        self._begun: dict[int, tuple[RewardInput, Future[Verdict]]] = {}
        """By `id`, which belongs to the sample as long as it is kept."""

    def __call__(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        """Judge a batch. Raises RunError: what the function raised of a sample."""
        for sample in samples:
            self.ahead(sample)
        try:
            return [self._result(sample, self._begun[id(sample)][1].result()) for sample in samples]
        finally:
            for _, verdict in self._begun.values():
                verdict.cancel()
            self._begun.clear()

    def ahead(self, sample: RewardInput, _: Sequence[RewardInput] = ()) -> None:
        """Begin to judge a sample, unless that was done before."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._size, thread_name_prefix=f"{self._name}-reward")
            for _worker in range(self._size):
                self._idle.put(self._start())
        if id(sample) not in self._begun:
            self._begun[id(sample)] = sample, self._threads.submit(self._judge, sample)

    def close(self) -> None:
        """End the workers; the next batch would start new ones."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
            for _ in range(self._size):
                self._idle.get().stop()

    def _judge(self, sample: RewardInput) -> Verdict:
        worker = self._idle.get()
        try:
            for _ in range(2):
                verdict = worker.judge(sample)
                if verdict in ("died", "timed-out"):
                    worker.stop()
                    worker = self._start()
                if verdict != "died":
                    break
            return verdict
        finally:
            self._idle.put(worker)

    def _result(self, sample: RewardInput, verdict: Verdict) -> RewardResult:
        if isinstance(verdict, RunError):
            raise verdict
        if isinstance(verdict, str):
            log.warning("the reward %s %s, scored 0: %s", self._name, verdict, sample.describe())
            return RewardResult(0.0, dict(self._unjudged))
        parts = {REWARD: verdict} if isinstance(verdict, float) else verdict
        kept = {name: number for name, number in parts.items() if name != REWARD}
        return RewardResult(parts[REWARD], kept | {UNJUDGED: 0.0})


class _Worker:
    """One process that judges one response at a time."""

    def __init__(self, name: str, function: str, deadline: float) -> None:
        # Forking a process with threads (torch, gloo, Ray) can deadlock the child.
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._ready = False
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_end, function, deadline), daemon=True)
        self._process.start()
        child_end.close()

    def judge(self, sample: RewardInput) -> Verdict:
        try:
            self._ready = self._ready or self._pipe.recv() == "ready"
        except (EOFError, OSError) as error:
            what = f"the worker process of the reward {self._name} does not start"
            fix = "see its traceback above; what the reward imports must be installed"
            raise RunError(WORKER(what, fix=fix)) from error
        try:
            self._pipe.send(sample)
            verdict: Verdict = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            return "timed-out" if self._process.exitcode == -signal.SIGALRM else "died"
        return verdict

    def stop(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, function: str, deadline: float) -> None:
    # stdout is for data, and workers may start at any time.
    os.dup2(2, 1)
    # Imports take seconds, which no sample should pay for.
    target = resolve_name(function)
    judge = target() if isinstance(target, type) else target
    # Ctrl-C reaches the whole process group; the parent decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe.send("ready")
    while True:
        try:
            sample = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        # The alarm's default action ends this process, even inside C code, and when the parent is long gone.
        signal.setitimer(signal.ITIMER_REAL, deadline)
        try:
            verdict: Verdict = judge(sample)
        except RunError as error:
            verdict = error
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send(verdict)
