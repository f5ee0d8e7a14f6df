"""`relax up`: runs are forks of a warm process, with the numbers of a cold one, and the process is in nobody's way."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_cli.cli import doctor
from relax_cli.engine import fork_client, forks
from relax_cli.engine.fork_client import SOCKET
from tests.support.cli_runs import RELAX, read_metrics
from tests.support.processes import started_by

CLIENT = [sys.executable, fork_client.__file__]
PATIENCE = 200.0


class Warm:
    """A cache folder of its own, with or without a warm process."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.folder = cache / "warm"
        # The last two as `relax` itself sets them.
        bars = dict.fromkeys(("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"), "1")
        self.env = os.environ | {"RELAX_CACHE": str(cache), "RELAX_WARM": "1"} | bars

    def relax(self, *words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*RELAX, *words], cwd=cwd, env=self.env | env, capture_output=True, text=True, timeout=PATIENCE
        )

    def python(self, code: str, cwd: Path, *words: str, **options: Any) -> subprocess.Popen[str]:
        """A program in a fork of the warm process."""
        program = cwd / "program.py"
        program.write_text(code)
        command = [*CLIENT, str(self.folder), SOCKET, str(program), *words]
        return subprocess.Popen(command, cwd=cwd, env=self.env, stdout=subprocess.PIPE, text=True, **options)

    def pid(self, cwd: Path) -> int:
        return int(json.loads(self.relax("up", "--format", "json", cwd=cwd).stdout)["pid"])


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    made = Warm(tmp_path_factory.mktemp("cache"))
    pid = made.pid(made.cache)
    yield made
    done = made.relax("down", cwd=made.cache)
    assert (done.returncode, done.stdout.strip()) == (0, "The warm process has ended."), done.stderr
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    until(lambda: sorted(path.name for path in made.folder.iterdir()) == ["lock", "log"])


def until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_warm_run_has_the_numbers_of_a_cold_one(warm: Warm, tmp_path: Path) -> None:
    found = {}
    for name, launcher in (("0", "local"), ("1", "local"), ("1", "ray")):
        folder = tmp_path / f"{name}-{launcher}"
        folder.mkdir()
        command = [*RELAX, "quickstart", "--steps", "1", "--launcher", launcher]
        server, workers = warm.pid(folder), 0
        with (folder / "log").open("w") as log:
            run = subprocess.Popen(command, cwd=folder, env=warm.env | {"RELAX_WARM": name}, stdout=log, stderr=log)
        deadline = time.monotonic() + 2 * PATIENCE
        while run.poll() is None and time.monotonic() < deadline:
            workers = max(workers, len(started_by(server, "ray::Role")))
            time.sleep(0.1)
        assert run.wait(1) == 0, (folder / "log").read_text()
        assert workers == (4 if launcher == "ray" else 0), "Ray's workers are forks as well"
        found[name, launcher] = read_metrics(folder / "quickstart")
    cold, *others = found.values()
    assert others == [cold, cold]


def test_a_fork_takes_the_place_of_its_process(warm: Warm, tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd(), sys.argv[1:], 'torch' in sys.modules, os.getppid()); sys.exit(7)"
    pid, run = warm.pid(tmp_path), warm.python(code, tmp_path, "a b")
    assert run.communicate(timeout=PATIENCE)[0].strip() == f"{tmp_path} ['a b'] True {pid}"
    assert run.returncode == 7


def test_a_fork_writes_to_pipes(warm: Warm, tmp_path: Path) -> None:
    warm.pid(tmp_path)
    done = warm.relax("train", "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Train a model." in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_fork(number: signal.Signals, warm: Warm, tmp_path: Path) -> None:
    code = f"""
import signal, sys, time
signal.signal({number:d}, lambda *_: sys.exit(5))
print("ready", flush=True)
time.sleep(600)
"""
    run = warm.python(code, tmp_path)
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    run.send_signal(number)
    assert run.wait(PATIENCE) == 5


@pytest.mark.parametrize("killed", ["client", "fork"])
def test_process_and_fork_die_together(killed: str, warm: Warm, tmp_path: Path) -> None:
    run = warm.python("import os, time; print(os.getpid(), flush=True); time.sleep(600)", tmp_path)
    assert run.stdout is not None
    fork = psutil.Process(int(run.stdout.readline()))
    os.kill(run.pid if killed == "client" else fork.pid, signal.SIGKILL)
    assert run.wait(PATIENCE) == -signal.SIGKILL
    until(lambda: not fork.is_running())
    assert warm.python("", tmp_path).wait(PATIENCE) == 0, "the warm process serves on"


def test_a_shell_with_other_settings_starts_cold(warm: Warm, tmp_path: Path) -> None:
    done = warm.relax("train", "--help", cwd=tmp_path, MKL_CBWR="COMPATIBLE")
    assert done.returncode == 0
    assert "not started from the warm process: MKL_CBWR is set differently" in done.stderr
    assert "relax down && " in done.stderr
    refused = warm.relax("up", cwd=tmp_path, MKL_CBWR="COMPATIBLE")
    assert refused.returncode == 4
    assert "[warm-outdated]" in refused.stderr
    assert "warm" not in warm.relax("train", "--help", cwd=tmp_path).stderr


def test_a_file_that_changed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "changing.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("changing")
    state = fork_client.process_state()
    found = forks.Warmth(json.loads(json.dumps(state)))
    assert found.difference(state) is None
    assert found.difference(state | {"prefix": "/elsewhere"}) == "prefix of this process: not that of relax up"
    (tmp_path / "changing.py").write_text("# another version")
    assert found.difference(state) == f"{tmp_path / 'changing.py'} has changed since relax up"
    monkeypatch.delitem(sys.modules, "changing")


def test_it_ends_when_nothing_starts_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with forks.listen(tmp_path, SOCKET) as listener:
        assert forks.ForkServer(listener, idle=0.05).serve() is None


def test_up_says_why_it_did_not_start(tmp_path: Path) -> None:
    cold = Warm(tmp_path)
    cold.folder.mkdir()
    with (cold.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = cold.relax("up", cwd=tmp_path)
    assert done.returncode == 4
    assert "[warm-not-started]" in done.stderr
    assert "another warm process starts" in done.stderr
    assert cold.relax("down", cwd=tmp_path).stdout.strip() == "No warm process is up."


def test_a_killed_warm_process_is_noticed_once(tmp_path: Path) -> None:
    cold = Warm(tmp_path)
    cold.folder.mkdir()
    forks_socket = fork_client.socket.socket(fork_client.socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(cold.folder)
    forks_socket.bind(SOCKET)
    os.chdir(here)
    forks_socket.close()
    notes = ["was killed" in cold.relax("train", "--help", cwd=tmp_path).stderr for _ in range(2)]
    assert notes == [True, False]


@pytest.mark.parametrize(
    ("answer", "status", "found"),
    [
        ({"pid": 7, "runs": [8], "refused": None}, "ok", "process 7, 1 run"),
        ({"pid": 7, "runs": [], "refused": "torch has changed"}, "note", "torch has changed"),
        ({}, None, None),
    ],
)
def test_doctor_tells_of_it(
    answer: dict[str, Any], status: str | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "tell", lambda _: answer)
    rows = [(check.status, check.found) for check in doctor.warm_checks()]
    assert rows == ([] if status is None else [(status, found)])
