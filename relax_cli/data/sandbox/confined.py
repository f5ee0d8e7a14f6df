"""What a process of the sandbox sees, may do and can take. Linux; of the standard library alone."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from relax_cli.data.sandbox import NOBODY

SCRATCH = "/scratch"
ROOT = "/proc"
"""The new root is put here, since nothing else of it is used."""
LIMITS = {
    resource.RLIMIT_AS: 1 << 30,
    resource.RLIMIT_FSIZE: 1 << 24,
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_NPROC: 64,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MEMLOCK: 0,
    resource.RLIMIT_MSGQUEUE: 0,
}
LIBC = ctypes.CDLL(None, use_errno=True)
NAMESPACES = 0x10000000 | 0x20000 | 0x20000000 | 0x40000000 | 0x8000000 | 0x4000000
"""Of users, mounts, processes, networks, inter-process communication and host names."""
BIND, RECURSIVE, PRIVATE = 4096, 16384, 1 << 18
# Of x86_64 and aarch64: what starts processes or programs, reaches others, takes memory past RLIMIT_AS, or has no
# place in a program but has had holes.
DENIED = {
    "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "socket": (41, 198), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219),
}  # fmt: skip
MACHINES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}
"""Column of `DENIED`, the audit number, and the number of clone."""


def call(name: str, *arguments: Any) -> None:
    """Call a function of libc. Raises OSError: it failed, with its name."""
    if getattr(LIBC, name)(*arguments):
        raise OSError(f"{name}: {os.strerror(ctypes.get_errno())}")


def die_with_parent() -> None:
    """The process is killed when its parent ends."""
    call("prctl", 1, signal.SIGKILL, 0, 0, 0)


def enter_root(paths: list[str]) -> None:
    """See nothing but these paths, read-only, four devices and an empty folder to write into."""
    call("mount", None, b"/", None, RECURSIVE | PRIVATE, None)
    call("mount", b"root", ROOT.encode(), b"tmpfs", 0, b"size=1m,mode=755")
    devices = [f"/dev/{name}" for name in ("null", "zero", "random", "urandom")]
    for path in paths:
        if os.path.islink(path):
            os.makedirs(os.path.dirname(ROOT + path), exist_ok=True)
            os.symlink(os.readlink(path), ROOT + path)
        elif os.path.isdir(path):
            os.makedirs(ROOT + path, exist_ok=True)
            bind(path)
        else:
            make_file(ROOT + path)
            bind(path)
    for path in devices:
        make_file(ROOT + path)
    os.mkdir(ROOT + SCRATCH)
    read_only = struct.pack("QQQQ", 1 | 2 | 4, 0, 0, 0)
    # mount_setattr, which libc may not know: read-only, without set-uid and devices, recursively.
    call("syscall", 442, -100, ROOT.encode(), 0x8000, read_only, len(read_only))
    for path in devices:
        bind(path)
    call("mount", b"scratch", (ROOT + SCRATCH).encode(), b"tmpfs", 2 | 4, b"size=32m,nr_inodes=4096,mode=1777")
    os.chdir(ROOT)
    call("pivot_root", b".", b".")
    call("umount2", b".", 2)
    os.chdir(SCRATCH)


def make_file(path: str) -> None:
    """An empty file, to be mounted on."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb"):
        pass


def bind(path: str) -> None:
    """Show a path at the same place in the new root."""
    call("mount", path.encode(), (ROOT + path).encode(), None, BIND | RECURSIVE, None)


def drop_privileges() -> None:
    """Become nobody, whom no process of the sandbox may inspect, for good."""
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    call("prctl", 38, 1, 0, 0, 0)  # no new privileges
    call("prctl", 4, 0, 0, 0, 0)  # not dumpable: no ptrace, no /proc/PID/mem
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (LIMITS[resource.RLIMIT_AS],) * 2)


def confine() -> None:
    """Limits and the filter of system calls, of a process that is about to run a response."""
    for kind, most in LIMITS.items():
        resource.setrlimit(kind, (most, most))
    column, machine, clone = MACHINES[platform.machine()]
    load, equal, at_least, has_bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, error = 0x7FFF0000, 0x80000000, 0x50000
    program = [(load, 0, 0, 4), (equal, 1, 0, machine), (answer, 0, 0, kill), (load, 0, 0, 0)]
    # Numbers from here on are another way to call the same, on x86_64.
    program += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, kill)]
    # Without clone3, whose flags no filter can see, threads start by clone.
    denied = [(numbers[column], 1) for numbers in DENIED.values() if numbers[column] >= 0] + [(435, 38)]
    for number, reason in denied:
        program += [(equal, 0, 1, number), (answer, 0, 0, error | reason)]
    program += [(equal, 0, 3, clone), (load, 0, 0, 16), (has_bits, 1, 0, 0x10000), (answer, 0, 0, error | 1)]
    program += [(answer, 0, 0, allow)]
    code = b"".join(struct.pack("HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(code)
    call("prctl", 22, 2, struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer)), 0, 0)


def in_program(given: int, writing: int, function: Callable[[], object]) -> None:
    """Call in this new process, which has nothing open but its input and output, and end it."""
    status = 1
    try:
        die_with_parent()
        silent = os.open("/dev/null", os.O_WRONLY)
        for end, place in ((given, 0), (writing, 1), (silent, 2)):
            os.dup2(end, place)
        os.closerange(3, 4096)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(end, mode, encoding="utf-8") for end, mode in enumerate("rww"))
        confine()
        function()
        sys.stdout.flush()
        status = 0
    except SystemExit as error:
        with suppress(Exception):
            sys.stdout.flush()
            status = int(error.code not in (None, 0))
    finally:
        os._exit(status)
