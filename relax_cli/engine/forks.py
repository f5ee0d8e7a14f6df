"""The warm process of `relax up`: it has imported what runs need, and every run is a fork of it.

A run has a second such process, forked before it has threads of its own, from which Ray's workers come: Ray starts
`fork_client.py` in the place of a worker's Python. All three end with what they belong to: a run with the terminal's
process, workers with the run, and with the processes that Ray started for them.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_cli.engine import fork_client
from relax_cli.engine.fork_client import LOCK, PATIENCE, SOCKET, WORKERS, is_fork, read_line
from relax_cli.engine.imports import LOCAL, TRANSFER_QUEUE, import_quickly

RUN_MODULES = (
    "relax_cli.cli.train",
    "relax_cli.engine.local",
    "relax_cli.engine.summary",
    "relax_cli.backends.rollout.embedded.engine",
    "tensordict",
    "transformers.models.auto.tokenization_auto",
    "zmq",
)
"""Not Ray: it reads which job and which node it belongs to when it is imported."""
WORKER_MODULES = ("relax_cli.engine.ray", *TRANSFER_QUEUE, "relax_cli.engine.ray.ranks")
READ_AT_IMPORT = (
    "ATEN_", "BLIS_", "CUDA_", "DNNL_", "GLIBC_", "GOMP_", "GOTO_", "HF_", "HOME", "KMP_", "LANG", "LC_", "LD_",
    "MALLOC_", "MKL_", "NCCL_", "NPY_", "NVTE_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH", "RAY_",
    "TMPDIR", "TORCH", "TQ_", "TRANSFORMERS_", "XDG_CACHE",
)  # fmt: skip
"""Beginnings of variables that a library reads once, when it is loaded."""
PR_SET_PDEATHSIG = 1


@dataclass
class ForkServer:
    """Forks this process on request; single-threaded, as a process that forks must be."""

    listener: socket.socket
    warm: Warmth | None = None
    """What a program must find as it is here; None: whoever asks has been started by the run that this belongs to."""
    idle: float | None = None
    """Seconds without a fork after which it ends."""
    owner: int | None = None
    """A pipe whose end means that the owner is gone."""
    ending: bool = False
    """Whether it ends with its last fork."""
    forks: dict[int, socket.socket] = field(default_factory=dict)
    """Process ids, and who waits for them."""
    events: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def serve(self) -> str | None:
        """Returns None at the end, and in every fork the Python file that it is to run."""
        self.events.register(self.listener, selectors.EVENT_READ)
        if self.owner is not None:
            self.events.register(self.owner, selectors.EVENT_READ)
        while self.forks or not self.ending:
            ready = self.events.select(None if self.forks else self.idle)
            if not ready and not self.forks:
                return None
            for key, _ in ready:
                if key.fileobj is self.listener:
                    program = self._answer(self.listener.accept()[0])
                    if program is not None:
                        return program
                elif key.fileobj == self.owner:
                    for pid in self.forks:
                        os.kill(pid, signal.SIGKILL)
                    return None
                else:
                    self._look(key)
        return None

    def _answer(self, channel: socket.socket) -> str | None:
        channel.settimeout(PATIENCE)
        files: list[int] = []
        try:
            start, files, _, _ = socket.recv_fds(channel, 1, 3)
            request = read_line(channel, start)
            refused = None if self.warm is None else self.warm.difference(request)
            if request["do"] == "run" and refused is None:
                return self._fork(channel, request, files)
            _tell(channel, pid=None if request["do"] == "run" else os.getpid(), runs=[*self.forks], refused=refused)
            if request["do"] == "end":
                self.events.unregister(self.listener)
                self.listener.close()
                self.ending = True
        except (OSError, ValueError, KeyError):
            pass  # Whoever asked has gone, or starts without a fork.
        finally:
            for file in files:
                os.close(file)
        channel.close()
        return None

    def _fork(self, channel: socket.socket, request: dict[str, Any], files: list[int]) -> str | None:
        if self.warm is None:
            # The job and the node of every worker of a run are the same.
            os.environ.update(
                {name: value for name, value in request["environment"].items() if name.startswith("RAY_")}
            )
            import_quickly(WORKER_MODULES)
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            # Whoever waits for this process must see its end.
            self.events.close()
            for opened in (self.listener, channel, *self.forks.values()):
                opened.close()
            if self.owner is not None:
                os.close(self.owner)
            become(request, files, server)
            return str(request["argv"][0])
        self.forks[pid] = channel
        self.events.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        self.events.register(channel, selectors.EVENT_READ, pid)
        _tell(channel, pid=pid)
        return None

    def _look(self, key: selectors.SelectorKey) -> None:
        """A fork has ended, or the process that waits for it."""
        pid: int = key.data
        self.events.unregister(key.fileobj)
        if isinstance(key.fileobj, socket.socket):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        assert isinstance(key.fileobj, int)
        os.close(key.fileobj)
        _, status = os.waitpid(pid, 0)
        channel = self.forks.pop(pid)
        with suppress(KeyError):
            self.events.unregister(channel)
        _tell(channel, status=status)
        channel.close()


class Warmth:
    """What was read while this process imported its libraries."""

    def __init__(self, started_from: dict[str, Any]) -> None:
        self.started_from = started_from
        places = {module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
        packages = {path for path in sys.path if path.endswith("-packages")}
        self.files = {path: _stamp(path) for path in (*places, *packages) if path is not None}

    def difference(self, request: dict[str, Any]) -> str | None:
        """What is not as it was when this process imported its libraries, as a sentence."""
        then, now = self.started_from, json.loads(json.dumps(request))
        for name in ("executable", "prefix", "version", "limits", "cores"):
            if then[name] != now[name]:
                return f"{name} of this process: not that of relax up"
        set_then, set_now = then["environment"], now["environment"]
        for name in sorted(set_then.keys() | set_now.keys()):
            if name.startswith(READ_AT_IMPORT) and set_then.get(name) != set_now.get(name):
                return f"{name} is set differently from where relax up was typed"
        changed = next((path for path, stamp in self.files.items() if _stamp(path) != stamp), None)
        return None if changed is None else f"{changed} has changed since relax up"


def become(request: dict[str, Any], files: list[int], parent: int) -> None:
    """In a fork: take over files, folder and environment of the process that asked."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = request["argv"]
    sys.path[:] = request["path"] or sys.path
    # New streams: those of the warm process seek in its log, which the file of a fork may be unable to do.
    for name, number in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        stream = io.TextIOWrapper(
            open(number, "wb", closefd=False),  # noqa: SIM115 - for the whole process
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=number == 2 or os.isatty(number),
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = open(0, closefd=False, encoding=sys.stdin.encoding)  # noqa: SIM115
    time.tzset()
    tempfile.tempdir = None
    importlib.invalidate_caches()
    importlib.import_module("numpy").random.seed()


def listen(folder: Path, name: str) -> socket.socket:
    """A socket in a folder of its user's own; this process's working folder becomes that folder."""
    os.chdir(folder)
    with suppress(FileNotFoundError):
        os.remove(name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(name)
    listener.listen(64)
    return listener


def fork_workers_from_here(folder: Path) -> str | None:
    """In a run: start the process that its Ray workers are forked from. In each of them, returns their program."""
    name, cwd = f"workers-{os.getpid()}", os.getcwd()
    listener = listen(folder, name)
    os.chdir(cwd)
    until, alive = os.pipe()
    if os.fork() > 0:
        listener.close()
        os.close(until)
        os.set_inheritable(alive, False)
        os.environ[WORKERS] = f"{os.getpid()} {name} {folder}"
        return None
    os.close(alive)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    # Ctrl-C is for the run, which ends its workers itself.
    os.setsid()
    program = ForkServer(listener, owner=until).serve()
    if program is None:
        os.remove(folder / name)
        os._exit(0)
    return program


def worker_python() -> dict[str, str]:
    """The part of Ray's runtime environment that lets its workers be forks, in a run that is one."""
    if not is_fork():
        return {}
    _, name, folder = os.environ[WORKERS].split(" ", maxsplit=2)
    return {"py_executable": shlex.join([sys.executable, "-I", "-S", fork_client.__file__, folder, name])}


def main() -> None:
    """`python -m relax_cli.engine.forks FOLDER IDLE_SECONDS`, with the state of `relax up` on stdin."""
    folder, idle = Path(sys.argv[1]), float(sys.argv[2])
    started_from = json.loads(sys.stdin.readline())
    lock = (folder / LOCK).open("a", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit("another warm process starts, or waits for its last run to end")
    lock.truncate(0)
    print(os.getpid(), file=lock, flush=True)
    for left in folder.glob("workers-*"):  # Of killed runs.
        left.unlink()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = dict(os.environ)
    import_quickly((*LOCAL, *RUN_MODULES))
    set_by_imports = {name: os.environ[name] for name in os.environ.keys() - before.keys()}
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        sys.exit(f"{threads} threads run after the imports: a process with threads cannot be forked safely")
    warm = Warmth(started_from)
    program = ForkServer(listen(folder, SOCKET), warm, idle).serve()
    if program is None:
        with suppress(FileNotFoundError):
            os.remove(folder / SOCKET)
        return
    lock.close()
    os.environ.update(set_by_imports | os.environ)
    program = fork_workers_from_here(folder) or program
    runpy.run_path(program, run_name="__main__")


def _tell(channel: socket.socket, **message: Any) -> None:
    with suppress(OSError):  # Its end is noticed where it is waited for.
        channel.sendall(json.dumps(message).encode() + b"\n")


def _stamp(path: str) -> tuple[int, int] | None:
    with suppress(OSError):
        found = os.stat(path)
        return found.st_mtime_ns, found.st_size
    return None


if __name__ == "__main__":
    main()
