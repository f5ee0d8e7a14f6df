"""`relax replay`: a real step is computed again to the bit; each kind of change is found in its stage, and named."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from relax_cli.cli.app import build_app
from relax_cli.roles.sample_files import SampleWriter, read_samples, sample_files
from tests.support.local_runs import train
from tests.support.quickstart import small_task

WORDS = ["batch.rollout_batch_size=16", "batch.micro_batch_size=8", "algorithm.normalize_advantages=true"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two steps each of an estimator with and without a critic; without it, the second trains what the first began."""
    folder = tmp_path_factory.mktemp("replay")
    small_task(folder / "task")
    groups = ["batch.n_samples_per_prompt=4", "algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.1"]
    ppo = ["critic.num_critic_only_steps=1"]
    carried = ["rollout.partial_rollout=true", "rollout.partial_rollout_len=1", "batch.over_sampling_batch_size=24"]
    for name, words in (("ppo", ppo), ("grpo", [*groups, *carried, "algorithm.use_tis=true"])):
        train(folder / "task", folder / name, f"tiny-{name}-cpu", *WORDS, *words)
    return {name: folder / name for name in ("ppo", "grpo")}


def replayed(run: Path, *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    result = CliRunner().invoke(build_app(), ["replay", str(run), *words, "--format", "json"])
    assert result.exit_code in (0, 1), result.stderr
    data = json.loads(result.stdout)
    assert data["ok"] is (result.exit_code == 0)
    return result.exit_code, {stage["name"]: stage for stage in data["stages"]}


@pytest.mark.parametrize(
    ("name", "step", "expected"),
    [
        ("ppo", "2", {"rewards", "advantages", "value loss", "policy loss"}),
        ("ppo", "1", {"rewards", "advantages", "value loss"}),
        ("grpo", "2", {"rewards", "advantages", "policy loss"}),
    ],
)
def test_a_step_is_the_same_again(runs: dict[str, Path], name: str, step: str, expected: set[str]) -> None:
    code, stages = replayed(runs[name], "--step", step)
    assert code == 0
    samples = read_samples(sample_files(runs[name])[int(step)])
    # Tokens of the weights from before the first step.
    assert any(0 in sample.get("weight_versions", [1]) for sample in samples) is (name == "grpo")
    assert {key for key, stage in stages.items() if stage["status"] == "same"} == expected
    assert {stage["status"] for key, stage in stages.items() if key not in expected} <= {"not replayed"}


def test_what_is_said_of_carried_tokens(runs: dict[str, Path]) -> None:
    lines = (runs["grpo"] / "metrics.jsonl").read_text().splitlines()
    for updates, (metrics, path) in enumerate(
        zip(map(json.loads, lines), sample_files(runs["grpo"]).values(), strict=True)
    ):
        ages = [updates - version for sample in read_samples(path) for version in sample["weight_versions"]]
        assert (min(ages), max(ages)) == (0, updates)
        assert metrics["partial/staleness/mean"] == pytest.approx(sum(ages) / len(ages))
        # Those of other weights than the newest are left out.
        assert metrics["train_rollout_logprob_diff/max"] < 1e-4


def in_config(section: str, key: str, value: Any) -> Callable[[Path], None]:
    """As if the installed code had another default."""

    def change(run: Path) -> None:
        record = json.loads((run / "config.json").read_text())
        record["config"][section][key] = value
        (run / "config.json").write_text(json.dumps(record))

    return change


def in_samples(change: Callable[[list[dict[str, Any]]], None]) -> Callable[[Path], None]:
    def rewrite(run: Path) -> None:
        samples = read_samples(sample_files(run)[2])
        change(samples)
        SampleWriter(run).write(2, samples)

    return rewrite


def another_reward(samples: list[dict[str, Any]]) -> None:
    samples[3]["label"] = "no answer" if samples[3]["reward"] else samples[3]["response"]


def one_bit(field: str) -> Callable[[Path], None]:
    def flip(samples: list[dict[str, Any]]) -> None:
        samples[5][field] = samples[5][field].copy()
        samples[5][field].view(np.int32)[1] ^= 1

    return in_samples(flip)


@pytest.mark.parametrize(
    ("name", "change", "stage", "place"),
    [
        ("ppo", in_samples(another_reward), "rewards", {"row": 3, "token": None}),
        ("ppo", one_bit("returns"), "advantages", {"row": 5, "token": 1, "metric": "returns"}),
        ("grpo", one_bit("advantages"), "advantages", {"row": 5, "token": 1, "metric": "advantages"}),
        ("ppo", in_config("algorithm", "lambd", 0.5), "advantages", {"row": 0, "token": 0}),
        ("ppo", in_config("critic", "value_clip", 1e-6), "value loss", {"metric": "value_loss"}),
        ("grpo", in_config("algorithm", "loss_aggregation", "constant"), "policy loss", {"metric": "pg_loss"}),
        ("grpo", in_config("algorithm", "kl_loss_type", "k2"), "policy loss", {"metric": "kl_loss"}),
    ],
)
def test_a_change_is_found_in_its_stage(
    runs: dict[str, Path],
    name: str,
    change: Callable[[Path], None],
    stage: str,
    place: dict[str, Any],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs[name], run)
    change(run)
    code, stages = replayed(run)
    assert code == 1
    differs = [stage for stage in stages.values() if stage["status"] == "differs"]
    assert differs[0]["name"] == stage
    first = differs[0]["first"]
    assert {key: first[key] for key in place} == place
    assert first["stored"] != first["recomputed"]
    shown = CliRunner().invoke(build_app(), ["replay", str(run)]).stdout
    assert f"first difference: {stage}" in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run.dump_rollouts=8"], "it needs all 16 samples of the step, and 8 are stored"),
        (["run.dump_token_numbers=false"], "not stored: values, advantages, returns"),
    ],
)
def test_what_was_not_stored_is_said(words: list[str], expected: str, runs: dict[str, Path], tmp_path: Path) -> None:
    train(runs["ppo"].parent / "task", tmp_path / "run", "tiny-ppo-cpu", *WORDS, *words, "batch.num_rollout=1")
    code, stages = replayed(tmp_path / "run")
    assert code == 0
    assert stages["rewards"]["status"] == "same"
    assert stages["advantages"]["detail"] == expected
    (path,) = sample_files(tmp_path / "run")[1]
    with zipfile.ZipFile(path) as archive:
        assert ("values.npy" in archive.namelist()) is ("8" in words[0])
