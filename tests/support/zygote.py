"""Starts runs of `relax` as forks of one process that has imported torch and the rest; a program, not a module.

It reads one JSON object per line, `{"argv": […], "out": FOLDER, "fault": [KIND, WHERE, NUMBER] | null, "ordinary":
BOOL, "kill_after": SECONDS | null, "place": [FOLDER, ENVIRONMENT] | null}`, answers with the pid of the new process,
and later with `[PID, EXIT STATUS]`. Each run has stdout and stderr of its own in FOLDER.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
import time
from typing import Any

# Before torch: a process whose OpenMP threads have run must not fork.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

OVERRIDES = (1, 2)
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: what lets root write and read where permissions forbid it."""
PR_CAPBSET_DROP = 24
CAPABILITY_VERSION = 0x20080522

LARGEST_DISK = 1 << 30
"""Bytes of the largest disk that a fault fills."""

FILE_EVENTS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"})
"""Audit events of Python that come just before a file or folder is made, renamed or removed, or opened."""


def preload() -> None:
    """Import what every run of the local launcher needs; nothing of it computes."""
    import transformers.models.auto.tokenization_auto  # noqa: F401

    import relax_cli.backends.megatron.trainer
    import relax_cli.backends.rollout.embedded.engine
    import relax_cli.cli.app
    import relax_cli.data.prompts
    import relax_cli.data.tokenise
    import relax_cli.engine.local
    import relax_cli.engine.run
    import relax_cli.engine.summary
    import relax_cli.engine.transfer
    import relax_cli.roles.actor
    import relax_cli.roles.critic
    import relax_cli.roles.rollout  # noqa: F401


def main() -> None:
    """Serve until the end of stdin."""
    preload()
    # What a killed process has written, the system keeps; what a lost machine keeps is tested in test_durability.py.
    os.fsync = lambda _: None  # type: ignore[assignment]
    signal.signal(signal.SIGCHLD, lambda *_: None)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(order)
        print(json.dumps(pid), flush=True)
        status = wait(pid, order["kill_after"])
        print(json.dumps([pid, os.waitstatus_to_exitcode(status)]), flush=True)


def wait(pid: int, kill_after: float | None) -> int:
    """Wait for a child, and end it when it takes longer than `kill_after` seconds; returns its status."""
    deadline = None if kill_after is None else time.monotonic() + kill_after
    while deadline is not None:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.002)
    return os.waitpid(pid, 0)[1]


def run(order: dict[str, Any]) -> None:
    """In the child: become `relax ARGV`; never returns."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        target = os.open(os.path.join(order["out"], name), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(target, number)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if order["ordinary"] and os.getuid() == 0:
        heed_permissions()
    if order["place"] is not None:
        folder, environment = order["place"]
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
    if order["fault"] is not None:
        sys.addaudithook(Fault(*order["fault"]))
    from relax_cli.cli.app import main as relax

    code = 99
    try:
        code = relax(order["argv"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def heed_permissions() -> None:
    """Let file permissions count for root as well, in this process and in those that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in OVERRIDES:
        assert libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
    header, sets = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for i in range(3):
        sets[i] &= ~sum(1 << capability for capability in OVERRIDES)
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


class Fault:
    """Does KIND at the N-th file operation on a path that contains WHERE.

    - `kill`: the process dies of SIGKILL; `kill SECONDS`: its other threads go on for so long.
    - `tear SECONDS`: the same, and of the file that would be renamed only half is there.
    - `SIGINT`, `SIGTERM,SIGINT`: the process gets these signals, one after the other.
    - `eio`: the operation fails as a broken disk does.
    - `fill FILE`: FILE takes all the room there is, until the save of another iteration begins.
    - `stay-full FILE`: the same, for good.
    - `move FOLDER`: FOLDER gets another name.
    - `count`: nothing; every operation is named on stderr.
    """

    def __init__(self, kind: str, where: str, number: int) -> None:
        self.kind, _, self.filler = kind.partition(" ")
        self.where = where
        self.number = number
        self.seen = 0
        self.iteration = ""

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        paths = [str(os.fspath(arg)) for arg in args if isinstance(arg, str | os.PathLike)]
        if event not in FILE_EVENTS or not paths or paths[0] == self.filler:
            return
        name = os.path.basename(paths[0])
        if event == "os.mkdir" and name.startswith(".iter_") and name != self.iteration:
            self.iteration = name
            if self.kind == "fill" and os.path.exists(self.filler):
                os.remove(self.filler)
        if not any(self.where in path for path in paths):
            return
        self.seen += 1
        if self.kind == "count":
            os.write(2, f"operation {self.seen} {event} {paths[0]}\n".encode())
        elif self.seen == self.number:
            self.happen(paths[0])

    def happen(self, path: str) -> None:
        """The fault itself."""
        if self.kind == "tear":
            os.truncate(path, os.path.getsize(path) // 2)
        if self.kind in ("kill", "tear"):
            time.sleep(float(self.filler or 0))
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "eio":
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        if self.kind == "move":
            os.rename(self.filler, self.filler + ".moved")
            return
        if not self.filler:
            for name in self.kind.split(","):
                os.kill(os.getpid(), signal.Signals[name])
                time.sleep(0.4)  # longer than what counts as one key
            return
        free = os.statvfs(os.path.dirname(self.filler))
        # A test that was interrupted has unmounted its small disk: never fill the one behind it.
        assert free.f_blocks * free.f_frsize < LARGEST_DISK, self.filler
        with open(self.filler, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)


if __name__ == "__main__":
    main()
