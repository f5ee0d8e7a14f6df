"""Processes end with the run that started them, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the guardian reads /proc")

RUN = """
import signal, subprocess, sys, time
from relax_cli.engine.ray.guardian import Guardian
guardian = Guardian()
sleeper = [sys.executable, "-c", "import subprocess, sys, time; "
           "inner = subprocess.Popen(['sleep', '1000']); print(inner.pid, flush=True); time.sleep(1000)"]
other = subprocess.Popen(["sleep", "1000"])
with guardian.adopting():
    child = subprocess.Popen(sleeper, preexec_fn=lambda: None, stdout=subprocess.PIPE, text=True)
inner = child.stdout.readline().strip()
print(child.pid, inner, other.pid, guardian._process.pid, flush=True)
END
"""


def start(end: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A process with a guardian; then its adopted child, the child of that, another child, and the guardian."""
    code = RUN.replace("END", end)
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert run.stdout is not None
    return run, [psutil.Process(int(pid)) for pid in run.stdout.readline().split()]


def gone(process: psutil.Process) -> bool:
    """Whether a process has ended."""
    return not psutil.wait_procs([process], timeout=60)[1]


def test_a_killed_run_leaves_none_of_its_adopted_processes() -> None:
    run, (child, inner, other, guardian) = start("time.sleep(1000)")
    run.kill()
    run.wait()
    assert gone(child)
    assert gone(inner)
    assert gone(guardian)
    assert other.is_running(), "only what was started inside the block is ended"
    other.kill()


def test_closing_ends_them_while_the_run_goes_on() -> None:
    run, (child, inner, other, guardian) = start("guardian.close(); guardian.close(); time.sleep(1000)")
    assert gone(inner)
    assert gone(guardian)
    assert run.poll() is None
    for process in (run, other):
        process.kill()
    run.wait()
    assert gone(child)


def test_a_ctrl_c_for_the_group_of_the_run_reaches_none_of_them() -> None:
    run, (child, inner, other, guardian) = start("time.sleep(1000)")
    os.killpg(run.pid, signal.SIGSTOP)
    os.waitpid(run.pid, os.WUNTRACED)
    assert child.status() != psutil.STATUS_STOPPED
    assert inner.status() != psutil.STATUS_STOPPED
    assert guardian.status() != psutil.STATUS_STOPPED
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    for process in (child, inner, other, guardian):
        assert gone(process)
