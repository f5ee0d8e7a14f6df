"""Runs Python that nobody trusts. `inside.py` is the other end, and says of what the sandbox consists."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from relax_cli.data.sandbox import NOBODY

INSIDE = "relax_cli.data.sandbox.inside"
PACKAGES = str(Path(__file__).parents[3])
ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "TMPDIR": "/scratch",
}
"""All that a response finds."""
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")

PROBE = """
import os, socket
secret = input()
def attempt(what, function, *arguments):
    try:
        function(*arguments)
    except (OSError, MemoryError):
        return
    print("lets a response", what)
os.kill(1, 9)
attempt("read a file of the user", open, secret)
attempt("see other processes", os.listdir, "/proc/self")
attempt("write outside of its folder", open, secret + "2", "w")
attempt("reach a network", socket.socket)
attempt("become root", os.setuid, 0)
attempt("take any amount of memory", bytearray, 2 << 30)
attempt("start processes", os.fork)
if len(os.environ) > 5:
    print("shows a response the environment")
"""
"""Tries what no response may do, and prints what succeeds."""
SETTINGS = (
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
    ("kernel/unprivileged_userns_clone", "0", "1"),
    ("user/max_user_namespaces", "0", "15000"),
)
"""Settings of Linux that forbid the sandbox to a user, with the value that does, and one that allows it."""


class SandboxError(Exception):
    """The sandbox cannot be had on this machine."""


@dataclass
class Ran:
    """What became of a response."""

    outputs: list[str | None] = field(default_factory=list)
    """What it printed for each input; None where it failed."""
    passed: list[bool] = field(default_factory=list)
    """Whether each test passed."""
    ended: Literal["", "late", "died"] = ""
    """Why the lists are shorter than what was given."""


class Sandbox:
    """Runs one response at a time. Its process starts with the first."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, code: str, inputs: list[str], tests: list[Any], seconds: float) -> Ran:
        """Run a response as a program on each input, then the tests on its functions, all within so many seconds.
        A test is Python text, or a function's name, its arguments and its value, as JSON has them.
        Raises SandboxError: the sandbox cannot be had on this machine."""
        ran, ends = Ran(), time.monotonic() + seconds
        try:
            self._begin(ends)
            self._send({"code": code, "inputs": inputs, "tested": bool(tests)})
            for _ in inputs:
                ran.outputs.append(self._receive(ends)["output"])
            if tests:
                self._send(tests)
            for _ in tests:
                ran.passed.append(self._receive(ends)["passed"])
        except TimeoutError:
            self.close()
            ran.ended = "late"
        except (EOFError, OSError):
            self.close()
            ran.ended = "died"
        return ran

    def close(self) -> None:
        """End its processes."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._asking.close()
            self._answers.close()

    def _begin(self, ends: float) -> None:
        if not sys.platform.startswith("linux"):
            raise SandboxError(f"it needs Linux, and this is {sys.platform}")
        if self._process is None:
            # Without site-packages, whose start-up files would run before anything is confined.
            start = f"import sys; sys.path.append({PACKAGES!r}); from {INSIDE} import main; sys.path.pop(); main()"
            command = [sys.executable, "-s", "-S", "-P", "-c", start]
            asked, self._asking = Pipe(duplex=False)
            self._answers, told = Pipe(duplex=False)
            with asked, told:
                reading, writing = asked.fileno(), told.fileno()
                self._process = subprocess.Popen(command, stdin=reading, stdout=writing, env=ENVIRONMENT, cwd="/")
        self._asking.send_bytes(b"")
        keeper = self._receive(ends)["pid"]
        _map_users(keeper)
        self._send({"visible": _visible_paths(), "packages": _packages()})

    def _send(self, message: Any) -> None:
        self._asking.send_bytes(json.dumps(message).encode())

    def _receive(self, ends: float) -> Any:
        if not self._answers.poll(max(0.0, ends - time.monotonic())):
            raise TimeoutError
        found = json.loads(self._answers.recv_bytes())
        if "error" in found:
            self.close()
            raise SandboxError(found["error"])
        return found


def _map_users(keeper: int) -> None:
    """Give the namespace its only user, nobody; root's is needed as well until everything is mounted."""
    folder = Path("/proc", str(keeper))
    is_root = os.geteuid() == 0
    try:
        folder.joinpath("setgroups").write_text("deny", "ascii")
        for name, own in (("gid_map", os.getegid()), ("uid_map", os.geteuid())):
            folder.joinpath(name).write_text(f"{NOBODY} {NOBODY} 1\n0 0 1" if is_root else f"{NOBODY} {own} 1", "ascii")
    except OSError as error:
        raise SandboxError(f"a user namespace gets no user: {error}") from error


def _packages() -> list[str]:
    folders = map(os.path.realpath, sys.path)
    return [path for path in folders if os.path.basename(path) in ("site-packages", "dist-packages")]


def _visible_paths() -> list[str]:
    """Python's libraries and what they load. Links are shown as links."""
    own = [f"{sys.base_prefix}/lib", sysconfig.get_path("stdlib"), *_packages()]
    found: list[str] = []
    for path in [*LIBRARIES, *map(os.path.realpath, own)]:
        if os.path.lexists(path) and not any(path == other or path.startswith(f"{other}/") for other in found):
            found.append(path)
    return found


@functools.cache
def sandbox_fault() -> str:
    """Why no sandbox holds on this machine, found out by attacks from within; empty where it does."""
    sandbox = Sandbox()
    try:
        with TemporaryDirectory() as folder:
            secret = Path(folder, "secret")
            secret.write_text("secret", "ascii")
            # So that nothing but the sandbox protects it.
            Path(folder).chmod(0o777)
            printed = sandbox.run(PROBE, [str(secret)], [], 60.0).outputs
        if printed != [""]:
            return "the sandbox " + (", ".join(str(printed[0]).splitlines()) if printed else "gives no answer")
        if sandbox.run("while True: pass", [""], [], 0.5).ended != "late":
            return "the sandbox does not end a response that runs for ever"
    except SandboxError as error:
        return f"there is no sandbox: {error}"
    finally:
        sandbox.close()
    return ""


def sandbox_fix() -> str:
    """What to do where the sandbox does not work."""
    for name, bad, good in SETTINGS:
        with suppress(OSError):
            if Path("/proc/sys", name).read_text("ascii").strip() == bad:
                return f"sudo sysctl -w {name.replace('/', '.')}={good}"
    container = "outside of a container that forbids user namespaces"
    return f"run on Linux 5.12 or later, {container}, or judge by --rm-type remote"
