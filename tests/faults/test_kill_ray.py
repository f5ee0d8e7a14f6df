"""`kill -9` with Ray: of the driver, which can clean up nothing, and of a worker."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from relax_cli.checkpoint import layout
from relax_cli.engine.ray.watch import children_named
from tests.support.cli_runs import wait_for
from tests.support.fault_runs import Folders, Zygote, arguments, assert_resumable, published
from tests.support.processes import listening, reachable_from_outside

ENOUGH = ["--num-rollout", "24", "--keep-checkpoints", "3"]


@pytest.fixture(scope="module")
def long_straight(zygote: Zygote, task: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """What the killed runs would have become; with Ray the numbers are the same."""
    folders = Folders(tmp_path_factory.mktemp("long"))
    ended = zygote.run(folders.root, arguments(task, folders, *ENOUGH))
    assert ended.code == 0, ended.err
    return folders


@pytest.fixture
def running(
    request: pytest.FixtureRequest, task: Path, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], Folders]]:
    """A run with Ray that has saved its first pair."""
    folders = Folders(tmp_path)
    options = [*ENOUGH, *getattr(request, "param", [])]
    argv = [sys.executable, "-m", "relax_cli", *arguments(task, folders, *options), "--launcher", "ray"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for((folders.critic / layout.TRACKER_FILE).exists, process)
    yield process, folders
    if process.poll() is None:
        process.kill()
    process.communicate()


def family_of(pid: int) -> list[psutil.Process]:
    """A process and all that it started."""
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def worker_of(role: str, family: list[psutil.Process]) -> psutil.Process:
    """The process that has the role's log open."""
    for process in family:
        try:
            if any(file.path.endswith(f"{role}-0.log") for file in process.open_files()):
                return process
        except psutil.Error:
            continue
    raise AssertionError(f"no worker of {role}")


def assert_gone(family: list[psutil.Process]) -> None:
    """No process of the run is left; Ray's own agents would stay for a minute."""
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not [(p.pid, p.status(), p.name()) for p in alive]


def resumed_to_the_end(zygote: Zygote, task: Path, folders: Folders, straight: Folders, what: str) -> None:
    """Where the killed run had come to, and that the rest is what it would have been."""
    assert assert_resumable(folders, what) >= 1
    ended = zygote.run(folders.root, arguments(task, folders, *ENOUGH))
    assert ended.code == 0, (what, ended.err)
    assert folders.metrics() == straight.metrics(), what
    assert folders.samples() == straight.samples(), what


def kill_driver(process: subprocess.Popen[str], seed: int) -> None:
    """After a random time; nothing is left of the run a few seconds later."""
    family = family_of(process.pid)
    time.sleep(random.Random(seed).uniform(0.0, 1.5))
    process.kill()
    process.communicate(timeout=30)
    assert_gone(family)


def kill_worker(process: subprocess.Popen[str], folders: Folders, role: str, seed: int) -> str:
    """After a random time; the run ends by itself, says which worker died, and how to go on. What it said."""
    family = family_of(process.pid)
    worker = worker_of(role, family)
    time.sleep(random.Random(seed).uniform(0.0, 1.0))
    worker.kill()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    assert "[worker-failed]" in err
    assert f"rank 0 of {role}" in err
    assert f"{role}-0.log" in err
    assert f"--load {folders.actor}" in err
    assert "Traceback" not in err
    assert_gone(family)
    return err


def test_a_killed_driver_leaves_no_process_and_its_run_resumes(
    zygote: Zygote,
    task: Path,
    running: tuple[subprocess.Popen[str], Folders],
    long_straight: Folders,
) -> None:
    process, folders = running
    # Also of the critic and Advantages, which tests/integration/test_network.py has not.
    assert reachable_from_outside(listening(process.pid)) == {}
    kill_driver(process, seed=1)
    resumed_to_the_end(zygote, task, folders, long_straight, "driver")


VICTIMS = {
    "actor": "rank 0 of actor is gone",
    "ray::TransferQueueController": "TransferQueueController (process",
    "ray::SimpleStorage": "SimpleStorageUnit (process",
    "raylet": "Ray's raylet is gone",
}
"""A role or the title of a process, and how it is named when it is lost."""


@pytest.mark.parametrize("running", [["--max-restarts", "1", "--async-save"]], indirect=True)
def test_a_worker_killed_after_a_restart_is_named(
    zygote: Zygote,
    task: Path,
    running: tuple[subprocess.Popen[str], Folders],
    long_straight: Folders,
) -> None:
    process, folders = running
    lost, reached = worker_of("actor", family_of(process.pid)), published(folders)
    lost.kill()
    # What the actor had begun to write may still be published; what comes after that is the restarted run's.
    wait_for(lambda: published(folders) > reached + 1, process)
    err = kill_worker(process, folders, "critic", seed=1)
    assert VICTIMS["actor"] in err
    assert f"restart 1 of 1, from the newest pair in {folders.actor}" in err
    resumed_to_the_end(zygote, task, folders, long_straight, "critic")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("victim", "running"),
    [
        ("actor", ["--max-restarts", "1", "--async-save"]),
        *((name, ["--max-restarts", "1"]) for name in VICTIMS),
    ],
    indirect=["running"],
)
def test_a_run_that_lost_a_process_restarts_with_its_numbers(
    running: tuple[subprocess.Popen[str], Folders], long_straight: Folders, victim: str
) -> None:
    process, folders = running
    family = family_of(process.pid)
    if victim == "actor":
        worker_of("actor", family).kill()
    else:
        psutil.Process(children_named(psutil.Process(process.pid), victim)[0][1]).kill()
    _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert VICTIMS[victim] in err
    assert f"restart 1 of 1, from the newest pair in {folders.actor}" in err
    assert folders.metrics() == long_straight.metrics()
    assert folders.samples() == long_straight.samples()
    assert_gone(family)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2, 8))
@pytest.mark.parametrize("victim", ["driver", "actor", "rollout"])
def test_more_kills_with_ray(
    zygote: Zygote,
    task: Path,
    running: tuple[subprocess.Popen[str], Folders],
    long_straight: Folders,
    victim: str,
    seed: int,
) -> None:
    process, folders = running
    if victim == "driver":
        kill_driver(process, seed)
    else:
        kill_worker(process, folders, victim, seed)
    resumed_to_the_end(zygote, task, folders, long_straight, f"{victim}, seed {seed}")


STAGES = ["--pipeline-model-parallel-size", "2"]
STAGES += ["--resource", '{"actor": [1, 2], "critic": [1, 2], "rollout": [1, 1], "advantages": [1, 0]}']


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("running", [STAGES], indirect=True)
def test_a_pipeline_killed_while_it_saves_resumes_on_one_rank(
    zygote: Zygote, task: Path, running: tuple[subprocess.Popen[str], Folders], long_straight: Folders
) -> None:
    process, folders = running
    family = family_of(process.pid)
    wait_for(lambda: bool(list(folders.critic.glob(".iter_*.tmp"))), process, pause=0.001)
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.communicate(timeout=30)
    assert_gone(family)
    assert assert_resumable(folders, "two stages") >= 1
    ended = zygote.run(folders.root, arguments(task, folders, *ENOUGH))
    assert ended.code == 0, ended.err
    for found, expected in zip(folders.metrics(), long_straight.metrics(), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("running", [["--rollout-batch-size", "2048", "--micro-batch-size", "128"]], indirect=True)
def test_a_second_ctrl_c_with_ray_stops_in_the_middle_of_a_step(running: tuple[subprocess.Popen[str], Folders]) -> None:
    process, folders = running
    family = family_of(process.pid)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.6)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "finishing step 2, then saving; Ctrl-C again stops now" in err
    assert "stopping now" in err
    assert "Traceback" not in err
    assert f"--load {folders.actor}" in out
    assert_resumable(folders, "two keys")
    assert_gone(family)
