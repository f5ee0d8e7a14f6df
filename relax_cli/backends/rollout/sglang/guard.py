"""Runs a command and ends it, with all it started, when whoever started this program is gone.

The command may be anything, its owner may die of `kill -9`: what tells is the end of this program's standard input.
Where this program itself is killed, as Ray does with the children of its workers, Linux ends the command.
This file is also that program, so it imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1


def run(command: list[str]) -> int:
    """Run `command` until it ends by itself or standard input ends; returns its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A handler, because a child inherits what is ignored.
        signal.signal(number, lambda *_: None)
    # Looked up before the fork, after which little is safe.
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    end_with_parent = prctl and functools.partial(prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=end_with_parent)

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        # Idle servers have nothing to finish: on SIGTERM they take 5 to 13 s, and on SIGKILL 1 to 2.
        _kill_group(child.pid)

    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    # A process that the command left running still occupies its GPU.
    _kill_group(child.pid)
    return code if code >= 0 else 128 - code


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
