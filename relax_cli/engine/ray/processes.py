"""Which processes of one machine have ended or been stopped, and how."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from relax_cli.plugin.apart import signal_name

STOPPED_SECONDS = 10.0
"""A process stopped (SIGSTOP) for so long counts as lost: everything else waits for it."""
EXIT_SECONDS = 1.0
"""How long a process that Ray calls dead may take to disappear."""

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
        self._watched[name] = (process, _pidfd(pid))

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


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid) if sys.platform == "linux" else None
    except OSError:
        return None


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
