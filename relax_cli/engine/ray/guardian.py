"""Ends the processes that a run started, even after `kill -9`, which nothing can catch.

The processes of a local Ray get sessions of their own, so that a signal to the run's process group (a terminal's
Ctrl-C, `kill -TERM -PGID`) reaches the run alone, which can then finish its step. A small process outside all of
this waits on a pipe: when the run has gone, it ends what is left in these sessions. Without it Ray's agents stay for
about a minute, because they first try to reach the server that died with the run.

This file is also the program of that process, so it imports nothing but the standard library.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 10.0
"""Seconds until processes that do not even die of SIGKILL (they wait for a disk) are left alone."""


class Guardian:
    """Watches over one run; Linux only, elsewhere it does nothing."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._adopting = False
        if sys.platform == "linux":
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
            os.register_at_fork(after_in_child=self._leave_session)

    @contextmanager
    def adopting(self) -> Iterator[None]:
        """Processes that Ray starts inside the block, and all that they start, end with this run."""
        self._adopting = True
        try:
            yield
        finally:
            self._adopting = False

    def close(self) -> None:
        """End what is left of the adopted processes now; safe to call twice."""
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        self._process.wait(PATIENCE + 5)

    def _leave_session(self) -> None:
        """In a child, between fork and exec: Ray starts its processes with a `preexec_fn`, which runs fork hooks."""
        if self._adopting and self._process is not None and self._process.stdin is not None:
            os.setsid()
            os.write(self._process.stdin.fileno(), f"{os.getpid()}\n".encode())


def watch(pipe: int) -> None:
    """Read session ids until every writer of `pipe` has gone, then kill their members."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with open(pipe, "rb") as lines:
        sessions = {int(line) for line in lines}
    deadline = time.monotonic() + PATIENCE
    while (left := members(sessions)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def members(sessions: Collection[int]) -> list[int]:
    """Ids of the processes in these sessions that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # "PID (NAME) STATE PARENT GROUP SESSION ...", where NAME may contain anything.
            state, _, _, session, *_ = path.read_text("utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(session) in sessions and state not in "ZX":
            found.append(int(path.parent.name))
    return found


if __name__ == "__main__":
    watch(sys.stdin.fileno())
