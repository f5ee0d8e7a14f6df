"""Whole runs of `relax train` with the real Ray, TransferQueue and Megatron on the CPU, as a user starts them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from relax_cli.quickstart.task import prepare
from tests.support.cli_runs import read_metrics, start, train

RANKS = '{"actor": [1, %d], "critic": [1, %d], "rollout": [1, %d], "advantages": [1, 0]}'


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model, data and recipe."""
    folder = tmp_path_factory.mktemp("task") / "quickstart"
    prepare(folder, seed=1, steps=3)
    return folder


@pytest.fixture(scope="module")
def local_run(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with `--launcher local`."""
    out = tmp_path_factory.mktemp("local")
    train(task, out, "--launcher", "local")
    return out


@pytest.fixture(scope="module")
def ray_run(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with Ray."""
    out = tmp_path_factory.mktemp("ray")
    train(task, out)
    return out


def test_ray_and_local_launchers_give_identical_metrics(local_run: Path, ray_run: Path) -> None:
    assert read_metrics(ray_run) == read_metrics(local_run)
    assert [m["step"] for m in read_metrics(local_run)] == [0, 1, 2]


def test_the_same_seed_gives_identical_metrics_and_another_seed_others(
    task: Path, local_run: Path, tmp_path: Path
) -> None:
    again = train(task, tmp_path / "again", "--launcher", "local")
    assert again == read_metrics(local_run)
    other = train(task, tmp_path / "other", "--launcher", "local", "--rollout-seed", "7", "--num-rollout", "1")
    assert other[0]["reward/mean"] != again[0]["reward/mean"] or other[0]["value_loss"] != again[0]["value_loss"]


def test_metrics_of_a_step_are_complete_and_a_critic_only_step_has_no_policy_loss(local_run: Path) -> None:
    first, second, _ = read_metrics(local_run)
    critic = {"value_loss", "value_clip_frac", "explained_variance", "critic/grad_norm", "critic/lr"}
    actor = {"pg_loss", "pg_clip_frac", "ppo_kl", "entropy", "actor/grad_norm", "actor/lr"}
    rollout = {f"{name}/{part}" for name in ("reward", "response_len") for part in ("mean", "std", "min", "max")}
    assert critic | rollout | {"truncated_frac"} <= first.keys()
    assert not actor & first.keys()
    assert critic | actor | {"train_rollout_logprob_diff/mean", "train_rollout_logprob_diff/max"} <= second.keys()


def test_engine_and_trainer_agree_on_log_probabilities_and_the_first_update_starts_at_ratio_one(
    local_run: Path,
) -> None:
    for step in read_metrics(local_run)[1:]:
        assert step["train_rollout_logprob_diff/max"] <= 1e-4


def test_samples_are_written_with_token_ids_and_per_token_numbers(local_run: Path) -> None:
    rows = [json.loads(line) for line in (local_run / "run/rollouts/step_000001.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == list(range(32))
    for row in rows:
        length = len(row["response_token_ids"])
        assert all(len(row[name]) == length for name in ("log_probs", "values", "advantages", "returns"))
        assert row["reward"] == float(row["response"] == row["label"] and row["finish_reason"] == "stop")
        # gamma is 1: every return of a sample is advantage plus value, whatever whitening did to the advantages.
        assert row["finish_reason"] in ("stop", "length")


def test_four_steps_equal_two_and_two_resumed(task: Path, tmp_path: Path) -> None:
    straight = train(task, tmp_path / "straight", "--launcher", "local", "--num-rollout", "4")
    split = tmp_path / "split"
    # A constant learning rate: the schedule of the shorter run is that of the longer one.
    train(task, split, "--launcher", "local", "--num-rollout", "2")
    load = ["--load", str(split / "actor"), "--critic-load", str(split / "critic")]
    resumed = train(task, split, "--launcher", "local", "--num-rollout", "4", *load)
    assert resumed == straight


@pytest.mark.parametrize("parallel", ["data", "tensor"])
def test_two_ranks_give_the_losses_of_one(task: Path, local_run: Path, tmp_path: Path, parallel: str) -> None:
    tensor = ["--tensor-model-parallel-size", "2"] if parallel == "tensor" else []
    two = train(task, tmp_path, "--resource", RANKS % (2, 2, 2), *tensor)
    for ours, theirs in zip(two, read_metrics(local_run), strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["reward/mean"] == theirs["reward/mean"]
        for name in ("value_loss", "pg_loss", "ppo_kl", "entropy"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name


@pytest.mark.parametrize("launcher", ["ray", "local"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_saves_its_step_leaves_no_process_and_prints_the_resume_command(
    task: Path, tmp_path: Path, launcher: str, number: signal.Signals, code: int
) -> None:
    """The signal goes to the whole process group, as from a terminal: the workers must live to finish the step."""
    process = start(task, tmp_path, "--num-rollout", "1000", "--save-interval", "1000", "--launcher", launcher)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, process)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "Traceback" not in err
    steps = len(read_metrics(tmp_path))
    # A signal that arrives between two steps is noticed in the next one.
    assert re.search(rf"finishing step {steps}, then saving|finishing step {steps - 1}, then saving", err), err
    for role in ("actor", "critic"):
        assert (tmp_path / role / "latest_checkpointed_iteration.txt").read_text().strip() == str(steps)
    assert "relax train" in out
    assert f"--load {tmp_path / 'actor'}" in out
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive


def test_overlapped_updates_change_no_number(task: Path, tmp_path: Path) -> None:
    one_thread = ["--threads-per-rank", "1"]
    in_turn = train(task, tmp_path / "in-turn", "--launcher", "local", *one_thread)
    assert train(task, tmp_path / "overlapped", "--overlap-updates", *one_thread) == in_turn


def test_ctrl_c_while_starting_ends_quickly_and_leaves_no_process(task: Path, tmp_path: Path) -> None:
    process = start(task, tmp_path)
    wait_for(lambda: (tmp_path / "run" / "logs" / "rollout-0.log").exists(), process)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until `ready`, as long as the run goes on."""
    deadline = time.monotonic() + 240
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_folder_that_is_in_use_and_a_wrong_resource_are_refused_before_anything_is_written(
    task: Path, local_run: Path, tmp_path: Path
) -> None:
    before = sorted(os.listdir(local_run / "run"))
    process = start(task, local_run, "--launcher", "local")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "run-dir-in-use" in err
    assert sorted(os.listdir(local_run / "run")) == before

    process = start(task, tmp_path / "new", "--resource", '{"actor": [1, 1]')
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--resource" in err
    assert not (tmp_path / "new").exists()
