"""A run leaves the cores to those who compute."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def environment(**more: str) -> dict[str, str]:
    """That of a user who has set nothing about threads."""
    return {name: value for name, value in os.environ.items() if name not in SETTINGS} | more


def test_threads_of_a_local_run_sleep_while_they_wait(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    argv = ["-m", "relax_cli", "quickstart", str(tmp_path / "q"), "--steps", "2", "--launcher", "local"]
    told = environment(OMP_DISPLAY_ENV="TRUE")
    done = subprocess.run([sys.executable, *argv], env=told, capture_output=True, text=True, timeout=300, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # OpenMP shows what it found when it was loaded, which is before anything computes.
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr
    assert "'ACTIVE'" not in done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 40


@pytest.mark.parametrize("chosen", ["passive", "active"])
def test_what_a_user_chose_stays(chosen: str) -> None:
    code = "import os; from relax_cli.cli.app import main; main(['--version']); print(os.environ['OMP_WAIT_POLICY'])"
    told = environment(OMP_WAIT_POLICY=chosen)
    done = subprocess.run(
        [sys.executable, "-c", code], env=told, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == chosen
