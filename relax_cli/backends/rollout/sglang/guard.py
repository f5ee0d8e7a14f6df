"""Runs a command and ends it, with all it started, when whoever started this program is gone.

The command may be anything, its owner may die of `kill -9`: what tells is the end of this program's standard input.
Where this program itself is killed, as Ray does with the children of its workers, Linux ends the command.
This file is also that program, so it imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1
PATIENCE = 15.0
"""Seconds from SIGTERM to SIGKILL."""


def run(command: list[str]) -> int:
    """Run `command` until it ends by itself or standard input ends; returns its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A handler, because a child inherits what is ignored.
        signal.signal(number, lambda *_: None)
    end_with_parent = _end_with_parent if sys.platform == "linux" else None
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=end_with_parent)
    ended = threading.Event()

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        # To the server alone: where its scheduler gets the signal as well and ends, the server takes that for a crash.
        child.terminate()
        if not ended.wait(PATIENCE):
            _kill_group(child.pid)

    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    ended.set()
    # A process that the command left running still occupies its GPU.
    _kill_group(child.pid)
    return code if code >= 0 else 128 - code


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
