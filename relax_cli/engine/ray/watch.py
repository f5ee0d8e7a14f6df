"""Watches every process that a run on Ray depends on: what dies or stops is named within seconds and ends the run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from relax_cli.engine.ray.processes import Loss, ProcessTable
from relax_cli.errors import ProcessLost, problem_kind

LOOK_SECONDS = 1.0
"""Between two looks at all processes."""
NODE_SECONDS = 60.0
"""A node that does not answer for so long is lost."""
SETTLE_SECONDS = 2.0
"""A process that dies breaks connections of others: so long the cause is waited for."""

WORKER_FAILED = problem_kind(
    "worker-failed",
    "During a run",
    "A worker process failed, died or was stopped. The message names role, rank, node, call, signal and log.",
)
PROCESS_LOST = problem_kind(
    "process-lost",
    "During a run",
    "A process that the run depends on, such as TransferQueue's controller or Ray's server, has died or was stopped.",
)


@dataclass(frozen=True)
class Whereabouts:
    """Where a process runs."""

    node: str
    node_id: str
    """Ray's name of the node."""
    pid: int


class _RemoteNode:
    """The table of another node, in a Ray actor there, asked without waiting for it."""

    def __init__(self, place: Whereabouts) -> None:
        strategy = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
        self.name = place.node
        self.actor: Any = ray.remote(ProcessTable).options(num_cpus=0, scheduling_strategy=strategy).remote()
        self._asked: tuple[Any, float] | None = None

    def losses(self) -> list[Loss]:
        """What it said since the last look."""
        if self._asked is None:
            self._asked = (self.actor.losses.remote(), time.monotonic())
        answer, since = self._asked
        done, _ = ray.wait([answer], timeout=0)
        if not done:
            silent = time.monotonic() - since > NODE_SECONDS
            return [Loss(f"node {self.name}", f"no answer for {NODE_SECONDS:.0f} s")] if silent else []
        self._asked = None
        try:
            found: list[Loss] = ray.get(answer)
        except ray.exceptions.RayError as error:
            return [Loss(f"node {self.name}", str(error).splitlines()[0])]
        return found


class ProcessWatch:
    """All processes of one run, on all nodes."""

    def __init__(self, this_node: str) -> None:
        self.this_node = this_node
        self.shutdown_hangs = False
        """Whether Ray's own shutdown would wait for a process that is lost."""
        self._here = ProcessTable()
        self._elsewhere: dict[str, _RemoteNode] = {}
        self._places: dict[str, Whereabouts] = {}
        self._logs: dict[str, Path] = {}
        self._next_look = 0.0

    def add(self, name: str, place: Whereabouts, log: Path | None = None) -> None:
        """Watch one more process, which writes to `log`."""
        self._places[name] = place
        if log is not None:
            self._logs[name] = log
        if place.node == self.this_node:
            self._here.add(name, place.pid)
            return
        if place.node not in self._elsewhere:
            self._elsewhere[place.node] = _RemoteNode(place)
        self._elsewhere[place.node].actor.add.remote(name, place.pid)

    def look(self, doing: str) -> None:
        """Look at all processes, unless that was done a moment ago.

        Args:
            doing: what is waited for.

        Raises:
            ProcessLost: a process has ended or stopped.
        """
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            for loss in [*self._here.losses(), *(loss for node in self._elsewhere.values() for loss in node.losses())]:
                raise self.failure(loss, doing)

    def settle(self, doing: str) -> None:
        """After a failure that may only follow from a process that died. Raises ProcessLost: one has."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            self._next_look = 0.0
            self.look(doing)
            time.sleep(0.1)

    def died(self, name: str, doing: str, error: ray.exceptions.RayError) -> ProcessLost:
        """The error of a worker that Ray calls dead."""
        place = self._places.get(name)
        if isinstance(error, ray.exceptions.OutOfMemoryError) or "low on memory" in str(error):
            what = "Ray killed it because its node was low on memory"
        elif place is not None and place.node == self.this_node:
            what = self._here.ending(name)
        else:
            what = str(error).strip().splitlines()[-1][:300]
        return self.failure(Loss(name, what), doing)

    def failure(self, loss: Loss, doing: str) -> ProcessLost:
        """The error of a lost process."""
        self.shutdown_hangs = self.shutdown_hangs or loss.name.startswith("Ray's") or "stopped" in loss.what
        place = self._places.get(loss.name)
        log = self._logs.get(loss.name)
        kind = PROCESS_LOST if log is None else WORKER_FAILED
        advice = "resume the run" if log is None else f"tail -n 40 {log}"
        if "memory" in loss.what:
            advice = "use fewer ranks in --resource or a smaller --micro-batch-size, or free memory on the node"
        elif "SIGKILL" in loss.what:
            advice += "; `dmesg | grep -i killed` shows whether the kernel's memory killer sent SIGKILL"
        return ProcessLost(
            kind(
                f"{loss.name} is gone: {loss.what} (during {doing})",
                where="" if place is None else f"node {place.node}, process {place.pid}",
                got=loss.what if log is None else last_words(log),
                expected="a process that lives as long as the run",
                fix=advice,
            )
        )


def last_words(log: Path) -> str:
    """The last line of a worker's log that says something."""
    try:
        lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return f"its log ends with: {lines[-1][:300]}" if lines else "its log is empty"
