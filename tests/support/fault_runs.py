"""Real processes that train the quickstart task, to be killed, starved and interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_cli.checkpoint import layout
from relax_cli.checkpoint.resume import examine_resume
from relax_cli.roles.sample_files import finite, read_samples, sample_files
from tests.support.cli_runs import read_metrics

STEPS = 6


@dataclass(frozen=True)
class Folders:
    """Where one run writes."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def actor(self) -> Path:
        return self.root / "saves" / "actor"

    @property
    def critic(self) -> Path:
        return self.root / "saves" / "critic"

    def metrics(self) -> list[dict[str, Any]]:
        """Everything in `metrics.jsonl` that does not depend on the clock."""
        return read_metrics(self.root)

    def samples(self) -> list[list[dict[str, Any]]]:
        """The sample records of every step."""
        return [[finite(sample) for sample in read_samples(paths)] for paths in sample_files(self.run).values()]


@dataclass(frozen=True)
class Ended:
    """The outcome of a run."""

    code: int
    """Exit status, negative for a signal."""
    out: str
    err: str


def arguments(task: Path, folders: Folders, *options: str) -> list[str]:
    """`relax train` of some fast steps with the local launcher, saved after each; it resumes what is there."""
    small = ["--rollout-batch-size", "8", "--micro-batch-size", "4", "--num-critic-only-steps", "1"]
    cheap = ["--launcher", "local", "--threads-per-rank", "1", "--num-rollout", str(STEPS), "--save-interval", "1"]
    no_eval = ["--set", "eval.eval_prompt_data=[]", "--set", "eval.eval_interval=null"]
    places = ["--run-dir", str(folders.run), "--save", str(folders.actor), "--critic-save", str(folders.critic)]
    load = ["--load", str(folders.actor), "--critic-load", str(folders.critic)]
    return ["train", "--recipe", str(task / "recipe.yaml"), *small, *cheap, *no_eval, *places, *load, *options]


class Zygote:
    """Starts runs as forks of one warm process."""

    def __init__(self) -> None:
        program = Path(__file__).with_name("zygote.py")
        self._process = subprocess.Popen(
            [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._answer() == "ready\n"
        self._running: int | None = None
        """Pid of the run that nothing has waited for."""

    def start(
        self,
        root: Path,
        argv: list[str],
        *,
        fault: tuple[str, str, int] | None = None,
        ordinary: bool = False,
        kill_after: float | None = None,
        place: tuple[str, dict[str, str]] | None = None,
    ) -> int:
        """Start `relax ARGV`; stdout and stderr go to files in `root`. Returns its pid.

        Args:
            fault: what happens at which file operation; see `zygote.Fault`.
            ordinary: file permissions count, also for root.
            kill_after: seconds until the run is killed.
            place: working folder and environment; those of the warm process when None.
        """
        root.mkdir(parents=True, exist_ok=True)
        assert self._process.stdin is not None
        if self._running is not None:
            # A test failed before it waited: its run must neither go on nor answer the next one.
            with suppress(ProcessLookupError):
                os.kill(self._running, signal.SIGKILL)
            self._answer()
        order = {"argv": argv, "out": str(root), "fault": fault, "ordinary": ordinary, "kill_after": kill_after}
        order["place"] = place
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        self._running = int(self._answer())
        return self._running

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready`."""
        deadline = time.monotonic() + 120
        while not ready():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def wait(self, root: Path) -> Ended:
        """Wait for the run that was started last."""
        _, code = json.loads(self._answer())
        self._running = None
        return Ended(code, (root / "stdout").read_text(), (root / "stderr").read_text())

    def run(self, root: Path, argv: list[str], **faults: Any) -> Ended:
        """Start and wait."""
        self.start(root, argv, **faults)
        return self.wait(root)

    def close(self) -> None:
        """End the warm process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that starts runs has died"
        return line


def published(folders: Folders) -> int:
    """The iteration that both trackers have reached; 0 before the first save."""
    found = [layout.read_tracker(folder) for folder in (folders.actor, folders.critic)]
    assert not any(tracker.problem for tracker in found)
    return min(tracker.iteration if isinstance(tracker.iteration, int) else 0 for tracker in found)


def complete_in_both(folders: Folders) -> int:
    """The newest iteration that is complete in both folders; 0 when there is none."""
    iterations = set(layout.list_iterations(folders.actor)) & set(layout.list_iterations(folders.critic))
    complete = [
        i
        for i in iterations
        if all(layout.is_complete(layout.iteration_folder(f, i)) for f in (folders.actor, folders.critic))
    ]
    return max(complete, default=0)


def assert_resumable(folders: Folders, what: str) -> int:
    """The verdict after a kill; returns the iteration that it resumes at."""
    places = str(folders.actor), str(folders.critic)
    report = examine_resume(*places, has_critic=True, deep=True, save=places[0], critic_save=places[1])
    assert not report.problems, (what, report.problems)
    iteration = report.decision.iteration or 0
    assert report.decision.verdict == ("resume" if iteration else "cold-start"), what
    assert published(folders) <= iteration <= complete_in_both(folders), what
    for folder in (folders.actor, folders.critic):
        for saved in layout.list_iterations(folder):
            assert layout.is_complete(layout.iteration_folder(folder, saved)), (what, folder, saved)
    return iteration
