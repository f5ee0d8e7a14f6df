"""Watches every process that a run on Ray depends on: what dies or stops is named within seconds and ends the run."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from relax_cli.errors import ProcessLost, problem_kinds
from relax_cli.plugin.apart import signal_name

STOPPED_SECONDS = 10.0
"""A process stopped (SIGSTOP) for so long counts as lost: everything else waits for it."""
EXIT_SECONDS = 1.0
"""How long a process that Ray calls dead may take to disappear."""
LOOK_SECONDS = 1.0
"""Between two looks at all processes."""
NODE_SECONDS = 60.0
"""A node that does not answer for so long is lost."""
SETTLE_SECONDS = 2.0
"""A process that dies breaks connections of others: so long the cause is waited for."""

during_a_run = problem_kinds("During a run")
WORKER_FAILED = during_a_run(
    "worker-failed",
    "A worker process failed, died or was stopped. The message names role, rank, node, call, signal and log.",
)
PROCESS_LOST = during_a_run(
    "process-lost",
    "A process that the run depends on, such as TransferQueue's controller or Ray's server, has died or was stopped.",
)

UNKNOWN_END = "ended without a word: killed by a signal, or by code that called os._exit"
PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
PIDFD_INFO_EXIT = 1 << 3


@dataclass(frozen=True)
class Loss:
    """A process that the run can no longer count on."""

    name: str
    what: str
    """What happened to it."""


class ProcessTable:
    """The processes of this machine that a run depends on."""

    def __init__(self) -> None:
        self._watched: dict[str, tuple[psutil.Process | None, int | None]] = {}
        self._stopped_at: dict[str, float] = {}
        self._kills_before = memory_kills()

    def add(self, name: str, pid: int) -> None:
        """Watch a process; one that has ended already is found at the next look."""
        try:
            process = psutil.Process(pid)
        except psutil.NoSuchProcess:
            process = None
        handle = None
        with suppress(OSError):
            handle = os.pidfd_open(pid) if sys.platform == "linux" else None
        self._watched[name] = (process, handle)

    def losses(self) -> list[Loss]:
        """The processes that have ended, or have been stopped for a while."""
        found = []
        for name, (process, handle) in self._watched.items():
            status = _status(process)
            if status != psutil.STATUS_STOPPED:
                self._stopped_at.pop(name, None)
            if status is None:
                found.append(Loss(name, self._ending(handle)))
            elif status == psutil.STATUS_STOPPED:
                since = self._stopped_at.setdefault(name, time.monotonic())
                if time.monotonic() - since >= STOPPED_SECONDS:
                    found.append(Loss(name, f"stopped by a signal (SIGSTOP) for {STOPPED_SECONDS:.0f} s"))
        return found

    def ending(self, name: str) -> str:
        """How a process that is said to be dead has ended."""
        process, handle = self._watched[name]
        deadline = time.monotonic() + EXIT_SECONDS
        while _status(process) is not None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._ending(handle)

    def _ending(self, handle: int | None) -> str:
        status = None if handle is None else exit_status(handle)
        if status is None:
            what = UNKNOWN_END
        elif os.WIFSIGNALED(status):
            what = f"killed by {signal_name(os.WTERMSIG(status))}"
        else:
            what = f"exited with code {os.WEXITSTATUS(status)}"
        killed = memory_kills() - self._kills_before
        return f"{what}; the kernel has killed {killed} processes for want of memory" if killed > 0 else what


def _status(process: psutil.Process | None) -> str | None:
    """Its state; None once it has ended."""
    if process is None or not process.is_running():
        return None
    try:
        status: str = process.status()
    except psutil.NoSuchProcess:
        return None
    return None if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else status


def exit_status(handle: int) -> int | None:
    """The wait status of an ended process that need not be a child; None where the kernel does not say."""
    answer = bytearray(64)
    struct.pack_into("Q", answer, 0, PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(handle, PIDFD_GET_INFO, answer)
    except OSError:
        return None
    (mask,) = struct.unpack_from("Q", answer, 0)
    (status,) = struct.unpack_from("i", answer, 60)
    return int(status) if mask & PIDFD_INFO_EXIT else None


def memory_kills() -> int:
    """Processes that the kernel's memory killer has ended since the machine started; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text("utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def children_named(process: psutil.Process, *names: str) -> list[tuple[str, int]]:
    """Title and id of the descendants whose command line begins with one of `names`."""
    found = []
    for child in process.children(recursive=True):
        try:
            title = Path((child.cmdline() or [child.name()])[0]).name
        except psutil.NoSuchProcess:
            continue
        found += [(title, child.pid)] if title.startswith(names) else []
    return found


@dataclass(frozen=True)
class Whereabouts:
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

    def add(self, name: str, pid: int) -> None:
        self.actor.add.remote(name, pid)


class ProcessWatch:
    """All processes of one run, on all nodes."""

    def __init__(self, this_node: str) -> None:
        self.this_node = this_node
        self.shutdown_hangs = False
        """Whether Ray's own shutdown would wait for a process that is lost."""
        self._here = ProcessTable()
        self._nodes: dict[str, ProcessTable | _RemoteNode] = {this_node: self._here}
        self._watched: dict[str, tuple[Whereabouts, Path | None]] = {}
        self._next_look = 0.0

    def add(self, name: str, place: Whereabouts, log: Path | None = None) -> None:
        """Watch one more process, which writes to `log`."""
        self._watched[name] = (place, log)
        if place.node not in self._nodes:
            self._nodes[place.node] = _RemoteNode(place)
        self._nodes[place.node].add(name, place.pid)

    def look(self, doing: str) -> None:
        """Look at all processes while `doing` is waited for, unless that was done a moment ago.
        Raises ProcessLost: one has ended or stopped."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            for loss in (loss for node in self._nodes.values() for loss in node.losses()):
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
        place, _ = self._watched.get(name, (None, None))
        if isinstance(error, ray.exceptions.OutOfMemoryError) or "low on memory" in str(error):
            what = "Ray killed it because its node was low on memory"
        elif place is not None and place.node == self.this_node:
            what = self._here.ending(name)
        else:
            what = str(error).strip().splitlines()[-1][:300]
        return self.failure(Loss(name, what), doing)

    def failure(self, loss: Loss, doing: str) -> ProcessLost:
        self.shutdown_hangs = self.shutdown_hangs or loss.name.startswith("Ray's") or "stopped" in loss.what
        place, log = self._watched.get(loss.name, (None, None))
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
