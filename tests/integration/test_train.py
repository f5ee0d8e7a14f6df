"""Whole runs of `relax train` with the real Ray, TransferQueue and Megatron on the CPU, as a user starts them."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from relax_cli.roles.sample_files import read_samples, sample_files
from tests.support.cli_runs import Metrics, read_metrics, start, train, wait_for, without_times
from tests.support.local_runs import train_small
from tests.support.quickstart import small_task

STEPS = 4


@dataclass(frozen=True)
class Interrupted:
    """A run that got a signal after its third step."""

    out: Path
    code: int
    stdout: str
    stderr: str
    alive: list[psutil.Process]
    """Its processes that still ran five seconds after it had ended."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model, data and recipe."""
    return small_task(tmp_path_factory.mktemp("task") / "quickstart", steps=STEPS)


@pytest.fixture(scope="module")
def local_run(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with `--launcher local`."""
    out = tmp_path_factory.mktemp("local")
    train(task, out, "--launcher", "local")
    return out


@pytest.fixture(scope="module")
def split_run(task: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Metrics], list[Metrics]]:
    """Metrics of the same run cut after two steps, and of its resumption to the end."""
    out = tmp_path_factory.mktemp("split")
    # A constant learning rate: the schedule of the shorter run is that of the longer one.
    first = train_small(task, out, "batch.num_rollout=2")
    load = (f"checkpoint.load={out / 'actor'}", f"critic.critic_load={out / 'critic'}")
    resumed = train_small(task, out, f"batch.num_rollout={STEPS}", *load)
    return without_times(first.metrics), without_times(resumed.metrics)


def interrupted(task: Path, out: Path, number: signal.Signals, *options: str) -> Interrupted:
    """The signal goes to the whole process group, as from a terminal: the workers must live to finish the step."""
    process = start(task, out, "--num-rollout", "1000", "--save-interval", "1000", *options)
    metrics = out / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 3, process)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    os.killpg(process.pid, number)
    stdout, stderr = process.communicate(timeout=120)
    _, alive = psutil.wait_procs(family, timeout=60)
    return Interrupted(out, process.returncode, stdout, stderr, alive)


@pytest.fixture(scope="module")
def ray_run(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """With Ray and overlapping updates until SIGTERM. A run on Ray that Ctrl-C ends is in test_network.py, one whose
    updates do not overlap in tests/faults/test_kill_ray.py."""
    options = ["--overlap-updates", "--threads-per-rank", "1"]
    return interrupted(task, tmp_path_factory.mktemp("ray"), signal.SIGTERM, *options)


def test_the_same_seed_gives_the_same_metrics_another_seed_not(
    task: Path, local_run: Path, split_run: tuple[list[Metrics], list[Metrics]], tmp_path: Path
) -> None:
    again, _ = split_run
    assert again == read_metrics(local_run)[:2]
    other = train_small(task, tmp_path / "other", "rollout.rollout_seed=7", "batch.num_rollout=1").metrics
    assert other[0]["reward/mean"] != again[0]["reward/mean"] or other[0]["value_loss"] != again[0]["value_loss"]


def test_metrics_are_complete_without_policy_loss_if_critic_only(local_run: Path) -> None:
    first, second, *_ = read_metrics(local_run)
    critic = {"value_loss", "value_clip_frac", "explained_variance", "critic/grad_norm", "critic/lr"}
    actor = {"pg_loss", "pg_clip_frac", "ppo_kl", "entropy", "actor/grad_norm", "actor/lr"}
    rollout = {f"{name}/{part}" for name in ("reward", "response_len") for part in ("mean", "std", "min", "max")}
    assert critic | rollout | {"truncated_frac"} <= first.keys()
    assert not actor & first.keys()
    assert critic | actor | {"train_rollout_logprob_diff/mean", "train_rollout_logprob_diff/max"} <= second.keys()


def test_engine_and_trainer_agree_on_log_probabilities(
    local_run: Path,
) -> None:
    for step in read_metrics(local_run)[1:]:
        assert step["train_rollout_logprob_diff/max"] <= 1e-4


def test_samples_have_token_ids_and_per_token_numbers(local_run: Path) -> None:
    rows = read_samples(sample_files(local_run / "run")[2])
    assert [row["row"] for row in rows] == list(range(32))
    for row in rows:
        length = len(row["response_token_ids"])
        assert all(
            len(row[name]) == length for name in ("log_probs", "values", "advantages", "returns", "train_values")
        )
        assert row["reward"] == float(row["response"] == row["label"] and row["finish_reason"] == "stop")
        # gamma is 1: every return of a sample is advantage plus value, whatever whitening did to the advantages.
        assert row["finish_reason"] in ("stop", "length")


def test_four_steps_equal_two_and_two_resumed(local_run: Path, split_run: tuple[list[Metrics], list[Metrics]]) -> None:
    _, resumed = split_run
    assert resumed == read_metrics(local_run)
    assert [step["step"] for step in resumed] == [1, 2, 3, 4]


def test_ray_and_overlapped_updates_change_no_number(task: Path, ray_run: Interrupted, tmp_path: Path) -> None:
    in_turn = train_small(task, tmp_path, "parallel.threads_per_rank=1", "batch.num_rollout=3")
    assert read_metrics(ray_run.out)[:3] == without_times(in_turn.metrics)


@pytest.mark.parametrize("how", ["ray, SIGTERM", "local, SIGTERM", "local, SIGINT"])
def test_an_interrupted_run_saves_its_step_and_leaves_no_process(
    task: Path, tmp_path: Path, how: str, request: pytest.FixtureRequest
) -> None:
    launcher, name = how.split(", ")
    if launcher == "ray":
        run: Interrupted = request.getfixturevalue("ray_run")
    else:
        run = interrupted(task, tmp_path, signal.Signals[name], "--launcher", "local")
    assert run.code == {"SIGINT": 130, "SIGTERM": 143}[name], run.stderr
    assert "Traceback" not in run.stderr
    steps = len(read_metrics(run.out))
    # A signal that arrives between two steps is noticed in the next one.
    finishing = rf"finishing step {steps}, then saving|finishing step {steps - 1}, then saving"
    assert re.search(finishing, run.stderr), run.stderr
    for role in ("actor", "critic"):
        assert (run.out / role / "latest_checkpointed_iteration.txt").read_text().strip() == str(steps)
    # The program is named as it was typed: here by the interpreter and the module.
    assert " train --recipe" in run.stdout
    assert f"--load {run.out / 'actor'}" in run.stdout
    assert not run.alive


def test_ctrl_c_while_starting_ends_fast_and_leaves_no_process(task: Path, tmp_path: Path) -> None:
    process = start(task, tmp_path)
    wait_for(lambda: (tmp_path / "run" / "logs" / "rollout-0.log").exists(), process)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_a_folder_in_use_and_a_wrong_resource_are_refused_early(task: Path, local_run: Path, tmp_path: Path) -> None:
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
