"""A resumed run is the uninterrupted one: to the bit at the same layout, to 1e-5 at another one."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from relax_cli.checkpoint import layout
from tests.support.cli_runs import start, without_times
from tests.support.local_runs import Finished, train, train_small

STEPS = 5
BATCH = 8
MID_EPOCH, EPOCH_END = 5 * BATCH, 2 * BATCH
"""Rows of a data set of which the second rollout is in the middle, or the last."""

SCHEDULE = (
    "optimizer.lr_warmup_iters=3",
    "critic.critic_lr_warmup_iters=4",
    "optimizer.lr_decay_style=cosine",
    "optimizer.min_lr=1e-5",
    "optimizer.weight_decay=0.01",
)


@dataclass(frozen=True)
class Case:
    """One kind of run and where it is cut."""

    recipe: str
    rows: int
    critic_only: int = 0
    saved_at: int = 2
    more: tuple[str, ...] = ()


CASES = {
    "ppo in the middle of an epoch": Case("ppo", MID_EPOCH),
    "ppo at an epoch's end, in the critic-only phase": Case("ppo", EPOCH_END, critic_only=3),
    "ppo after another epoch and the critic-only phase": Case("ppo", EPOCH_END, critic_only=1, saved_at=3),
    "ppo with adapters": Case("ppo", MID_EPOCH, more=("model.lora_rank=4", "critic.critic_lora_rank=2")),
    "grpo in the middle of an epoch": Case("grpo", MID_EPOCH),
    "grpo at an epoch's end": Case("grpo", EPOCH_END),
    "grpo that draws until groups differ": Case(
        "grpo", MID_EPOCH, more=("batch.dynamic_sampling=true", "batch.over_sampling_batch_size=11")
    ),
    "grpo with a curriculum and responses that are carried over": Case(
        "grpo",
        EPOCH_END,
        more=(
            "data.curriculum=learnability",
            "rollout.partial_rollout=true",
            "rollout.partial_rollout_len=1",
            "batch.over_sampling_batch_size=11",
        ),
    ),
    "grpo with a curriculum that draws until groups differ": Case(
        "grpo", MID_EPOCH, more=("data.curriculum=learnability", "batch.dynamic_sampling=true")
    ),
}


def options(case: Case, task: Path, out: Path) -> list[str]:
    """Small steps, saved each, on the first rows of the data."""
    data = out.parent / f"rows-{case.rows}.jsonl"
    data.write_text("".join((task / "data/train.jsonl").read_text().splitlines(keepends=True)[: case.rows]))
    words = [
        *SCHEDULE,
        *case.more,
        f"data.prompt_data={data}",
        f"batch.rollout_batch_size={BATCH}",
        "batch.micro_batch_size=4",
        "batch.global_batch_size=null",
        "batch.num_steps_per_rollout=2",
        f"batch.num_rollout={STEPS}",
        "checkpoint.save_interval=1",
        f"checkpoint.save={out / 'actor'}",
        "parallel.threads_per_rank=1",
    ]
    if case.recipe == "ppo":
        words += [f"critic.critic_save={out / 'critic'}", f"critic.num_critic_only_steps={case.critic_only}"]
    else:
        words += ["batch.n_samples_per_prompt=4"]
    return words


def recipe_of(case: Case, task: Path) -> str:
    """The recipe file or the name of a bundled one."""
    return str(task / "recipe.yaml") if case.recipe == "ppo" else f"tiny-{case.recipe}-cpu"


def copy_checkpoint(source: Path, target: Path, iteration: int) -> None:
    """A save folder as it was when `iteration` was its newest."""
    shutil.copytree(layout.iteration_folder(source, iteration), layout.iteration_folder(target, iteration))
    layout.write_tracker(target, iteration)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by name, read without the code that is tested."""
    reader = FileSystemReader(str(folder))
    found = reader.read_metadata().state_dict_metadata.items()
    shapes = {name: entry for name, entry in found if isinstance(entry, TensorStorageMetadata)}
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in shapes.items()}
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def assert_same_state(one: Path, other: Path, *, role: str) -> None:
    """Parameters, Adam's moments and step counts, schedule and random state are equal to the bit."""
    tensors, expected = tensors_of(one), tensors_of(other)
    assert any("exp_avg_sq" in name for name in expected), "the moments are compared, too"
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), f"{role}: {name}"
    common, expected_common = (torch.load(folder / "common.pt", weights_only=True) for folder in (one, other))
    assert "scheduler" in common
    assert "optimizer" in common
    assert repr(common) == repr(expected_common)
    assert layout.read_meta(one).random_state == layout.read_meta(other).random_state
    hashes = [{e.path: e.sha256 for e in layout.read_meta(f).files if e.path.endswith(".distcp")} for f in (one, other)]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_the_uninterrupted_one_bitwise(task: Path, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    straight, split = tmp_path / "straight", tmp_path / "split"
    for folder in (straight, split):
        folder.mkdir()
    whole = train(task, straight / "run", recipe_of(case, task), *options(case, task, straight))
    roles = ["actor", "critic"] if case.recipe == "ppo" else ["actor"]
    loads = []
    for role in roles:
        copy_checkpoint(straight / role, split / role, case.saved_at)
        loads.append(f"{'critic.critic_load' if role == 'critic' else 'checkpoint.load'}={split / role}")
    resumed = train(task, split / "run", recipe_of(case, task), *options(case, task, split), *loads)

    assert [m["step"] for m in whole.metrics] == list(range(1, STEPS + 1))
    assert without_times(resumed.metrics) == without_times(whole.metrics)[case.saved_at :]
    assert resumed.samples == whole.samples[case.saved_at :]
    rates = [m["actor/lr"] for m in whole.metrics if "actor/lr" in m]
    assert len(set(rates)) == len(rates), "every step has a learning rate of its own"
    for iteration in range(case.saved_at + 1, STEPS + 1):
        for role in roles:
            assert_same_state(*(layout.iteration_folder(f / role, iteration) for f in (split, straight)), role=role)


def test_saving_changes_nothing(task: Path, tmp_path: Path) -> None:
    case = Case("ppo", MID_EPOCH)
    found: list[Finished] = []
    for name, further in (("saving", []), ("not", ["checkpoint.save_interval=null"])):
        (tmp_path / name).mkdir()
        words = [*options(case, task, tmp_path / name), *further]
        found.append(train(task, tmp_path / name / "run", recipe_of(case, task), *words))
    assert without_times(found[0].metrics) == without_times(found[1].metrics)
    for role in ("actor", "critic"):
        last = [layout.iteration_folder(tmp_path / name / role, STEPS) for name in ("saving", "not")]
        assert_same_state(*last, role=role)


TWO_RANKS = '{"actor": [1, 2], "critic": [1, 2], "rollout": [1, 1], "advantages": [1, 0]}'


@pytest.mark.timeout(1800)
def test_a_run_that_changes_its_layout_keeps_losses_and_prompts(task: Path, tmp_path: Path) -> None:
    """It starts tensor parallel and moves to one process; tests/integration/test_network.py moves from there to two."""
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    two_ranks = ("--resource", TWO_RANKS, "--launcher", "ray", "--tensor-model-parallel-size", "2")
    process = start(task, moved, "--num-rollout", "2", "--save-interval", "1", *two_ranks)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    steps = ("batch.num_rollout=3", "checkpoint.save_interval=1")
    load = (f"checkpoint.load={moved / 'actor'}", f"critic.critic_load={moved / 'critic'}")
    ours, theirs = train_small(task, moved, *steps, *load), train_small(task, straight, *steps)

    parallel = [layout.read_meta(layout.iteration_folder(moved / "critic", i)).parallel for i in (2, 3)]
    assert [(p["tensor_parallel"], p["data_parallel"]) for p in parallel] == [(2, 1), (1, 1)]
    for one, other in zip(without_times(ours.metrics), without_times(theirs.metrics), strict=True):
        assert one.keys() == other.keys()
        assert one["step"] == other["step"]
        assert one["reward/mean"] == other["reward/mean"]
        for name in ("value_loss", "pg_loss", "ppo_kl", "entropy", "actor/lr", "critic/lr"):
            assert one.get(name) == pytest.approx(other.get(name), abs=1e-5), (one["step"], name)
    assert prompts(ours) == prompts(theirs)
    assert len(prompts(theirs)) == 3


def prompts(run: Finished) -> list[list[str]]:
    """The prompts of every step, in order."""
    return [[sample["prompt"] for sample in step] for step in run.samples]
