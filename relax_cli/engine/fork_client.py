"""Runs a program as a fork of a process that has imported its libraries (`forks.py`).

This file is also the program that Ray starts in the place of a worker's Python, so it imports nothing but the standard
library. Without a process to fork from, it becomes that Python.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH")
"""Signals that the fork gets in the place of the process that waits for it."""
SOCKET = "socket"
"""Where the warm process of `relax up` listens, in its folder."""
LOCK = "lock"
"""The file with its process id, which it keeps locked."""
WORKERS = "_RELAX_WORKERS"
"""In a run that is a fork: its process id, then name and folder of the socket through which its Ray workers start."""
PATIENCE = 10.0
"""Seconds that an answer may take; a process that is stopped gives none."""
LIMITS = ("AS", "CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "RSS", "STACK")


def is_fork() -> bool:
    """Whether this process is a run that was forked from the warm process."""
    return os.environ.get(WORKERS, "").partition(" ")[0] == str(os.getpid())


def connect(folder: str, name: str) -> socket.socket | None:
    """The socket `name` in `folder`, whose path may be longer than addresses of sockets; None if nobody listens."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    channel.settimeout(PATIENCE)
    with suppress(OSError):
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            channel.connect(f"/proc/self/fd/{at}/{name}")
            return channel
        finally:
            os.close(at)
    channel.close()
    return None


def ask(channel: socket.socket, request: dict[str, Any], files: tuple[int, ...] = ()) -> dict[str, Any]:
    """The answer to a request, which takes open files along; empty if there is none."""
    data = json.dumps(request).encode() + b"\n"
    try:
        socket.send_fds(channel, [data[:1]], list(files))
        channel.sendall(data[1:])
        return read_line(channel)
    except OSError:
        return {}


def read_line(channel: socket.socket, data: bytes = b"") -> dict[str, Any]:
    """One message, of which `data` was read already; empty at the end of the connection."""
    while not data.endswith(b"\n"):
        more = channel.recv(1 << 16)
        if not more:
            return {}
        data += more
    message: dict[str, Any] = json.loads(data)
    return message


def process_state() -> dict[str, Any]:
    """What a new process inherits from this one."""
    return {
        "executable": sys.executable,
        "prefix": sys.prefix,
        "version": sys.version,
        "environment": dict(os.environ),
        "limits": {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in LIMITS},
        "cores": sorted(os.sched_getaffinity(0)),
    }


def start(channel: socket.socket, argv: list[str]) -> dict[str, Any]:
    """Ask for a fork that runs a Python file in the place of this process: its `pid`, or `refused`."""
    umask = os.umask(0)
    os.umask(umask)
    request = process_state() | {"do": "run", "argv": argv, "umask": umask}
    # This program as Ray starts it (-S) knows no packages.
    path = sys.path if not sys.flags.no_site else None
    return ask(channel, request | {"cwd": os.getcwd(), "path": path}, (0, 1, 2))


def wait(channel: socket.socket, pid: int) -> int | None:
    """The wait status of the fork, which gets the signals of this process; None if the process it came from died."""

    def pass_on(number: int, _: Any) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    for name in PASSED_ON:
        signal.signal(getattr(signal, name), pass_on)
    channel.settimeout(None)
    with suppress(OSError):
        return read_line(channel).get("status")
    return None


def end_like(status: int | None) -> int:
    """The exit code of a process with this wait status; ends this one by the same signal."""
    if status is None or os.WIFSIGNALED(status):
        number = signal.SIGKILL if status is None else os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    assert status is not None
    return os.waitstatus_to_exitcode(status)


def main() -> int:
    """`fork_client.py FOLDER NAME PROGRAM ARGUMENTS`: run a Python program."""
    folder, name, *argv = sys.argv[1:]
    channel = connect(folder, name)
    answer = {} if channel is None else start(channel, argv)
    if channel is None or not answer.get("pid"):
        os.execv(sys.executable, [sys.executable, *argv])
    return end_like(wait(channel, answer["pid"]))


if __name__ == "__main__":
    sys.exit(main())
