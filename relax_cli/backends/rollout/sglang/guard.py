"""Runs a command and ends it, with all it started, when whoever started this program is gone.

The command may be anything, its owner may die of `kill -9`: what tells is the end of this program's standard input.
Where this program itself is killed, as Ray does with the children of its workers, Linux ends the command.
This file is also that program, so it imports nothing but the standard library.
"""

from __future__ import annotations

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
        signal.signal(number, _ignore)
    end_with_parent = _end_with_parent if sys.platform == "linux" else None
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=end_with_parent)
    ended = threading.Event()

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        _signal_group(child.pid, signal.SIGTERM)
        if not ended.wait(PATIENCE):
            _signal_group(child.pid, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    ended.set()
    # A process that the command left running still occupies its GPU.
    _signal_group(child.pid, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _ignore(*_: object) -> None:
    pass


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
