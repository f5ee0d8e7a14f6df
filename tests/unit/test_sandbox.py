"""Attacks on the sandbox from within, and what a program may do there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_cli.data.sandbox import inside, outside
from relax_cli.data.sandbox.outside import Ran, Sandbox, sandbox_fault

pytestmark = pytest.mark.skipif(bool(sandbox_fault()), reason=sandbox_fault())


LONG = 60.0
"""A deadline that a busy machine keeps."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox()
    yield made
    made.close()


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that everybody may write, so that nothing but the sandbox protects it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


ATTACKS = {
    "read a file of the user": "open('{secret}').read()",
    "read a file by a link": "os.symlink('{secret}', '/scratch/link'); open('/scratch/link').read()",
    "look into the folder of a file": "os.listdir('{folder}')",
    "read the environment of the trainer": "open('/proc/{parent}/environ').read()",
    "read its own memory map": "open('/proc/self/maps').read()",
    "see a list of users": "open('/etc/passwd').read()",
    "see devices": "os.listdir('/sys/class')",
    "write next to a file of the user": "open('{secret}2', 'w')",
    "write into the root": "open('/file', 'w')",
    "write into a library": "open(os.__file__, 'a')",
    "replace a library": "os.unlink(os.__file__)",
    "fill the disk": "[open(f'/scratch/{{n}}', 'wb').write(bytes(1 << 23)) for n in range(10)]",
    "write a large file": "f = open('/scratch/f', 'wb'); [f.write(bytes(1 << 20)) for _ in range(20)]; f.flush()",
    "make many files": "[open(f'/scratch/{{n}}', 'w').close() for n in range(5000)]",
    "open many files": "[open('/dev/null') for _ in range(100)]",
    "reach the network": "socket.create_connection(('127.0.0.1', 1), 1)",
    "listen": "socket.socket().bind(('127.0.0.1', 0))",
    "reach a Unix socket": "socket.socket(socket.AF_UNIX)",
    "fork": "os.fork()",
    "start a program": "subprocess.run(['/bin/true'])",
    "become a program": "os.execv('{python}', ['python'])",
    "start many threads": "[threading.Thread(target=time.sleep, args=(9,), daemon=True).start() for _ in range(100)]",
    "take memory": "bytearray(2 << 30)",
    "take memory in pieces": "x = [bytearray(1 << 26) for _ in range(40)]",
    "take memory in a file": "os.memfd_create('x')",
    "take shared memory": "failing(libc.shmget(0, 1 << 20, 0o1600))",
    "raise a limit": "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))",
    "become root": "os.setuid(0)",
    "mount": "failing(libc.mount(b'x', b'/scratch', b'tmpfs', 0, None))",
    "unmount": "failing(libc.umount2(b'/usr/lib', 2))",
    "make namespaces": "failing(libc.unshare(0x10000000))",
    "trace the grader": "failing(libc.ptrace(16, 1, 0, 0))",
    "read the grader's memory": "failing(libc.process_vm_readv(1, None, 0, None, 0, 0))",
    "use 32-bit calls": "failing(libc.syscall(0x40000000 + 39))",
    "signal the trainer": "os.kill({parent}, 9)",
    "make a device": "os.mknod('/scratch/d', 0o60600, os.makedev(254, 0))",
    "change the clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
}
PREAMBLE = """
import ctypes, os, resource, socket, subprocess, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def failing(result):
    if result == -1: raise OSError(ctypes.get_errno())
"""


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_fails(attack: str, sandbox: Sandbox, public: Path) -> None:
    secret = public / "secret"
    secret.write_text("secret")
    places = {"secret": secret, "folder": public, "parent": os.getpid(), "python": os.path.realpath("/bin/true")}
    code = f"{PREAMBLE}{ATTACKS[attack].format(**places)}\nprint('done')"
    ran = sandbox.run(code, [""], [], LONG)
    assert (ran.outputs, ran.ended) == ([None], "")
    assert [path.name for path in public.iterdir()] == ["secret"]


def test_an_innocent_program_passes(sandbox: Sandbox) -> None:
    code = f"""{PREAMBLE}
thread = threading.Thread(target=lambda: print(sum(map(int, input().split()))))
thread.start()
thread.join()
open('/scratch/file', 'w').write('x')
print(os.listdir('.'), os.getuid(), sorted(os.environ))
"""
    (printed,) = sandbox.run(code, ["1 2"], [], LONG).outputs
    assert printed == f"3\n['file'] 65534 {sorted(outside.ENVIRONMENT)}\n"


def test_a_grading_leaves_nothing_to_the_next(sandbox: Sandbox) -> None:
    assert sandbox.run("open('/scratch/f', 'w')", [""], [], LONG).outputs == [""]
    assert sandbox.run("import os; print(os.listdir('/scratch'))", [""], [], LONG).outputs == ["[]\n"]


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\ntime.sleep(99)",
        "import signal, time\nfor n in (1, 2, 3, 6, 14, 15, 24): signal.signal(n, signal.SIG_IGN)\ntime.sleep(99)",
        "import os, time\nos.kill(1, 9)\nos.kill(1, 19)\ntime.sleep(99)",
    ],
)
def test_a_response_without_end_is_ended(code: str) -> None:
    sandbox = Sandbox()
    assert sandbox.run("print(1)", ["", ""], [], LONG) == Ran(["1\n", "1\n"])
    assert sandbox._process is not None
    started = psutil.Process(sandbox._process.pid)
    inside: list[psutil.Process] = []

    def look() -> None:
        while started.is_running() and len(inside) < 3:
            inside[:] = started.children(recursive=True)

    looking = threading.Thread(target=look)
    looking.start()
    assert sandbox.run(code, ["", ""], [], 1.0).ended == "late"
    looking.join(LONG)
    deadline = time.monotonic() + LONG
    while any(process.is_running() for process in inside) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(process.is_running() for process in inside)
    assert sandbox.run("print(1)", [""], [], LONG) == Ran(["1\n"])
    sandbox.close()


def test_a_killed_worker_leaves_no_process() -> None:
    code = "from relax_cli.data.sandbox.outside import Sandbox; Sandbox().run('while True: pass', [''], [], 99.0)"
    worker = psutil.Process(subprocess.Popen([sys.executable, "-c", code]).pid)
    deadline = time.monotonic() + LONG
    while len(inside := worker.children(recursive=True)) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    worker.kill()
    worker.wait()
    while any(process.is_running() for process in inside):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("code", ["while True: print('x' * 1000)", "import os\nos.write(1, bytes(2 << 20))"])
def test_endless_output_ends_the_response(code: str, sandbox: Sandbox) -> None:
    assert sandbox.run(code, [""], [], LONG).outputs == [None]


FAKES = {
    "leave early": "import os\nos._exit(0)",
    "leave": "raise SystemExit(0)",
    "leave in the function": "def f(x):\n  import os\n  os._exit(0)",
    "equal to everything": "class A:\n  __eq__ = lambda a, b: True\n  __ne__ = lambda a, b: False\nf = lambda x: A()",
    "a derived number": "class A(int):\n  __eq__ = lambda a, b: True\nf = lambda x: A()",
    "shadow names of Python": "def f(x): return 0\ndef abs(x): return 1\ndef isinstance(*a): return True",
    "patch Python": "import builtins\nbuiltins.abs = lambda x: 1\nbuiltins.AssertionError = int\nf = lambda x: 0",
    "trace": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: sys.exit(0))\nf = lambda x: 0",
    "answer the grader": "import os\nfor n in range(3, 64):\n  try: os.write(n, b'{\"passed\": true}' * 99)\n"
    "  except OSError: pass\nf = lambda x: 0",
    "print the answer": "print('{\"passed\": true}')\nf = lambda x: 0",
    "read the test": "import sys\nd = 0\nwhile True:\n  try: frame = sys._getframe(d)\n  except ValueError: break\n"
    "  if 'assert abs' in repr(frame.f_locals): abs = lambda x: 2\n  d += 1\nf = lambda x: 0",
    "send code": "class A:\n  def __reduce__(self): return (eval, ('2',))\nf = lambda x: A()",
    "raise what tests expect": "f = lambda x: 1 / 0",
    "not Python": "def f(",
}


@pytest.mark.parametrize("fake", FAKES)
def test_a_verdict_is_not_faked(fake: str, sandbox: Sandbox) -> None:
    tests: list[Any] = ["assert abs(f(1)) == 2", ["f", [1], 2], "try:\n  assert f(1) == 2\nexcept ValueError: pass"]
    assert sandbox.run(FAKES[fake], [], tests, LONG).passed == [False] * 3


GOOD = """
from collections import Counter, defaultdict, namedtuple
class Solution:
    def add(self, a, b=1): return a + b
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]
Point = namedtuple('Point', 'x y')
def counts(x): return Counter(x)
def gen(n): yield from range(n)
def point(): return Point(1, float('inf'))
def fails(): raise ValueError('no')
def twice(function_result): return function_result * 2
def many(): return {(1, 2): {3}, 'x': [None, True, b'y', 1j, frozenset({1})]}
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert counts('aab') == {'a': 2, 'b': 1}",
        "assert list(gen(3)) == [0, 1, 2]",
        "assert point() == (1, float('inf'))",
        "import math\nassert math.isclose(twice(1.5), 3.0)",
        "assert many() == {(1, 2): {3}, 'x': [None, True, b'y', 1j, frozenset({1})]}",
        "assert Solution().add(1) == 2 and Solution().add(a=1, b=2) == 3",
        "s = Stack()\ns.push(5)\nassert len(s) == 1 and s[0] == 5 and s.items == [5]",
        "def check(candidate):\n  assert candidate(2) == 4\n  assert sorted(many(), key=str)[1] == 'x'\ncheck(twice)",
        "try:\n  fails()\n  assert False\nexcept ValueError as error:\n  assert str(error) == 'no'",
        ["add", [1, 2], 3],
        ["point", [], [1, float("inf")]],
        ["twice", [2], [4]],
    ],
)
def test_tests_may_use_what_responses_define(test: Any, sandbox: Sandbox) -> None:
    assert sandbox.run(GOOD, [], [test], LONG).passed == [True]


def test_packages_may_be_imported_and_arrays_are_lists(sandbox: Sandbox) -> None:
    code = (
        "import numpy as np\ndef f(x): return np.array(x) * 2\ndef g(x): return {'n': np.int64(x), 'x': np.float32(x)}"
    )
    tests = ["assert f([1, 2]) == [2, 4]", "assert g(3) == {'n': 3, 'x': 3.0}", ["f", [[[1]]], [[2]]]]
    assert sandbox.run(code, [], tests, LONG).passed == [True] * 3


@pytest.mark.parametrize(
    "broken", ["assert Solution().add(1) == 3", "assert no_such_name", "assert twice(lambda: 1)", ["add", [1, 2], 4]]
)
def test_a_wrong_value_or_name_fails_alone(broken: Any, sandbox: Sandbox) -> None:
    assert sandbox.run(GOOD, [], [broken, ["twice", [1], 2]], LONG).passed == [False, True]


def test_where_namespaces_are_forbidden_there_is_no_sandbox() -> None:
    show = "from relax_cli.data.sandbox.outside import *; print(sandbox_fault(), '|', sandbox_fix())"
    forbid = f'echo 0 > /proc/sys/user/max_user_namespaces; exec "{sys.executable}" -c "{show}"'
    done = subprocess.run(["unshare", "-Ur", "sh", "-c", forbid], capture_output=True, text=True, timeout=60)
    assert done.stdout == (
        "there is no sandbox: unshare: No space left on device | sudo sysctl -w user.max_user_namespaces=15000\n"
    ), done.stderr


def test_a_hole_is_found_before_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = outside._visible_paths()
    monkeypatch.setattr(outside, "_visible_paths", lambda: [*shown, tempfile.gettempdir()])
    monkeypatch.setattr(outside, "ENVIRONMENT", outside.ENVIRONMENT | {"SECRET": "1"})
    fault = sandbox_fault.__wrapped__()
    assert fault == "the sandbox lets a response read a file of the user, shows a response the environment"


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_grader_whose_keeper_has_ended_runs_nothing(is_alive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in ("enter_root", "drop_privileges"):
        monkeypatch.setattr(inside, step, lambda *_: None)
    monkeypatch.setattr(inside, "run_on", lambda code, text: text)
    (asked, asking), (answers, told), (alive, held) = Pipe(duplex=False), Pipe(duplex=False), os.pipe()
    asking.send_bytes(b'{"code": "", "inputs": ["x"], "tested": false}')
    if not is_alive:
        os.close(held)
    inside.grade(asked, told, alive, [])
    assert answers.poll() is is_alive
    assert asked.poll() is not is_alive, "the job is left unread"
