"""Runs that begin from bare weights, and critics that begin from their actor."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file, save_file

from relax_cli.backends.megatron import checkpointing
from relax_cli.checkpoint import layout
from relax_cli.errors import ResumeError
from relax_cli.plugin.launch_plan import LoadFrom
from tests.support.checkpoints import decide_resume
from tests.support.cli_runs import without_times
from tests.support.local_runs import Finished, train
from tests.support.tiny_models import on_ranks, save_tiny_model
from tests.support.training_runs import ROWS, Run, build, micro_batches


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two tiny models of one shape with different weights."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "one", "qwen3")
    other_weights(folder / "one", folder / "two")
    return folder / "one", folder / "two"


def other_weights(model: Path, copy: Path) -> None:
    """The same model folder with every weight another."""
    shutil.copytree(model, copy)
    generator = torch.Generator().manual_seed(3)
    file = copy / "model.safetensors"
    weights = {n: w + 0.1 * torch.randn(w.shape, generator=generator) for n, w in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def write_release(model: Any, save_dir: Path) -> Path:
    """The weights of a trainer as Megatron's converters leave them: no `relax.json`, objects of their own in common."""
    folder = save_dir / "release"
    folder.mkdir(parents=True)
    state = model.model.sharded_state_dict(metadata=checkpointing.sharding_metadata())
    checkpointing.prepare({"model": state, "args": {"num_layers": 2}}, copied=False)(folder, None)
    (save_dir / layout.TRACKER_FILE).write_text("release\n")
    return folder


def save_weights(run: Run, save_dir: Path) -> Path:
    return write_release(build(run), save_dir)


def save_on_rank(rank: int, ranks: int, port: int, run: Run, save_dir: Path) -> None:
    model = build(run, rank, ranks, port)
    (save_dir / "release").mkdir(parents=True, exist_ok=True)
    state = model.model.sharded_state_dict(metadata=checkpointing.sharding_metadata())
    checkpointing.prepare({"model": state}, copied=False)(save_dir / "release", None)


def outputs_from(rank: int, ranks: int, port: int, run: Run, folder: Path | None) -> np.ndarray[Any, Any]:
    """What a model says of six samples, before any training."""
    model = build(run, rank, ranks, port)
    if folder is not None:
        model.load_weights(folder)
    grid: np.ndarray[Any, Any] = model.forward(micro_batches(6, ROWS))[0].main.numpy()
    return grid


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_weights_replace_those_of_the_model_folder_to_the_bit(
    kind: Any, two_models: tuple[Path, Path], tmp_path: Path
) -> None:
    one, two = two_models
    folder = save_weights(Run("policy", one), tmp_path)
    started = outputs_from(0, 1, 0, Run(kind, two), folder)
    assert np.array_equal(started, outputs_from(0, 1, 0, Run(kind, one), None))
    assert not np.array_equal(started, outputs_from(0, 1, 0, Run(kind, two), None))


def test_what_megatrons_own_writer_leaves_is_understood(
    two_models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # That writer asks for a CUDA device, and its common file holds an object that is not for us to unpickle.
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    one, two = two_models
    model = build(Run("policy", one))
    folder = tmp_path / "iter_0000500"
    folder.mkdir()
    state = model.model.sharded_state_dict(metadata=checkpointing.sharding_metadata())
    common = {"args": argparse.Namespace(num_layers=2), "iteration": 500, "checkpoint_version": 3.0}
    dist_checkpointing.save({"model": state, **common}, str(folder))
    layout.write_tracker(tmp_path, 500)
    source = decide_resume(str(tmp_path), None, has_critic=True).critic
    assert source == LoadFrom(folder, weights_only=True)
    started = outputs_from(0, 1, 0, Run("value", two), source.folder)
    assert np.array_equal(started, outputs_from(0, 1, 0, Run("value", one), None))


@pytest.mark.parametrize(
    ("way", "saved", "loaded"),
    [("tensor_parallel", 1, 2), ("tensor_parallel", 2, 1), ("pipeline_parallel", 2, 2)],
)
def test_weights_load_at_another_layout(
    way: str, saved: int, loaded: int, two_models: tuple[Path, Path], tmp_path: Path
) -> None:
    one, two = two_models
    source = replace(Run("policy", one), **{way: saved})  # type: ignore[arg-type]
    if saved == 1:
        save_weights(source, tmp_path)
    else:
        on_ranks(2, save_on_rank, source, tmp_path)
    expected = outputs_from(0, 1, 0, Run("value", one), None)
    target = replace(Run("value", two), **{way: loaded})  # type: ignore[arg-type]
    folder = tmp_path / "release"
    found = on_ranks(2, outputs_from, target, folder)[0] if loaded == 2 else outputs_from(0, 1, 0, target, folder)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_only_the_weights_of_a_training_checkpoint_are_taken(two_models: tuple[Path, Path], tmp_path: Path) -> None:
    one, two = two_models
    trained = build(Run("value", one))
    trained.train_step(micro_batches(6, ROWS), squared)
    trained.prepare_save({}, copied=False)(tmp_path, None)
    fresh, head = build(Run("value", two)), build(Run("value", two)).value_head()
    fresh.load_weights(tmp_path)
    for name, parameter in fresh.model.named_parameters():
        if not name.startswith("output_layer."):
            assert torch.equal(parameter, dict(trained.model.named_parameters())[name]), name
    assert torch.equal(fresh.value_head(), head)
    assert not torch.equal(fresh.value_head(), trained.value_head())
    assert fresh.optimizer_steps == 0
    first = fresh.train_step(micro_batches(6, ROWS), squared)
    assert first.lr == pytest.approx(5e-4)  # the first of two steps of warm-up


@pytest.mark.parametrize("bf16", [False, True])
def test_training_starts_from_weights_also_with_master_copies(
    bf16: bool, two_models: tuple[Path, Path], tmp_path: Path
) -> None:
    one, two = two_models
    folder = save_weights(Run("value", one, bf16=bf16), tmp_path)
    expected, started = build(Run("value", one, bf16=bf16)), build(Run("value", two, bf16=bf16))
    started.load_weights(folder)
    for _ in range(2):
        steps = [model.train_step(micro_batches(6, ROWS), squared) for model in (expected, started)]
        assert steps[0] == steps[1]
    outputs = [model.forward(micro_batches(6, ROWS))[0].main for model in (expected, started)]
    assert torch.equal(*outputs)


def squared(output: Any, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return (output.values_BT**2).mean(), {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": 3}, "(2, "),
        ({"family": "llama"}, "unknown to the model"),
        ({"tied": True}, "output_layer.weight, unknown to the model"),
    ],
)
def test_weights_of_another_model_are_refused(
    change: dict[str, Any], said: str, two_models: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = save_weights(Run("policy", two_models[0]), tmp_path)
    save_tiny_model(tmp_path / "other", **{"family": "qwen3", **change})
    with pytest.raises(ResumeError) as caught:
        build(Run("policy", tmp_path / "other")).load_weights(folder)
    assert caught.value.problems[0].id == "weights-other-model"
    assert said in caught.value.problems[0].got


def test_a_padded_vocabulary_loads_and_a_larger_one_does_not(two_models: tuple[Path, Path], tmp_path: Path) -> None:
    one, two = two_models
    for rows, fits in ((128, True), (100, False), (64, False)):
        folder = save_padded(build(Run("policy", one)), tmp_path / str(rows), rows)
        model = build(Run("policy", two))
        if fits:
            model.load_weights(folder)
            found = model.forward(micro_batches(6, ROWS))[0].main.numpy()
            assert np.array_equal(found, outputs_from(0, 1, 0, Run("policy", one), None))
        else:
            with pytest.raises(ResumeError, match="not those of the model"):
                model.load_weights(folder)


def save_padded(model: Any, folder: Path, rows: int) -> Path:
    """The weights with a vocabulary of another size, as `make_vocab_size_divisible_by` leaves them."""
    folder.mkdir()
    state = model.model.sharded_state_dict(metadata=checkpointing.sharding_metadata())
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        old = state[name].data
        new = torch.zeros(rows, old.size(1))
        new[: min(rows, len(old))] = old[:rows]
        state[name].data = new
        state[name].local_shape = state[name].global_shape = tuple(new.shape)
    checkpointing.prepare({"model": state}, copied=False)(folder, None)
    return folder


def ppo(task: Path, out: Path, **options: Any) -> Finished:
    """Short PPO steps of the quickstart."""
    small = {
        "batch.rollout_batch_size": 32,
        "batch.micro_batch_size": 16,
        "critic.num_critic_only_steps": 0,
        "batch.num_rollout": 1,
        "checkpoint.save": None,
        "critic.critic_save": None,
    }
    words = [f"{name}={json.dumps(value)}" for name, value in {**small, **options}.items()]
    return train(task, out, str(task / "recipe.yaml"), *words)


@pytest.fixture(scope="module")
def release(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart model's weights as a `release` checkpoint."""
    folder = tmp_path_factory.mktemp("release") / "weights"
    write_release(build(Run("policy", task / "model")), folder)
    return folder


def test_a_run_from_release_weights_equals_the_model_folders(task: Path, release: Path, tmp_path: Path) -> None:
    expected = ppo(task, tmp_path / "expected")
    other_weights(task / "model", tmp_path / "model")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in release.rglob("*"))
    run = ppo(
        task,
        tmp_path / "run",
        **{"model.hf_checkpoint": str(tmp_path / "model"), "checkpoint.load": str(release)},
    )
    assert without_times(run.metrics) == without_times(expected.metrics)
    assert run.samples == expected.samples
    assert "weights only: the run starts at step 1" in run.screen
    assert "the critic takes the same weights and a new value head" in run.screen
    # Nothing is written where weights are only read from.
    assert sorted((path.name, path.stat().st_mtime_ns) for path in release.rglob("*")) == before


@pytest.fixture(scope="module")
def pair(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved PPO run of one step."""
    out = tmp_path_factory.mktemp("pair")
    places = {"checkpoint.save": str(out / "actor"), "critic.critic_save": str(out / "critic")}
    ppo(task, out / "run", **places)
    return out


def test_a_checkpoint_says_what_its_run_is_made_of(pair: Path, task: Path) -> None:
    meta = layout.read_meta(pair / "actor/iter_0000001")
    assert meta.extra["estimator"] == "ppo"
    assert meta.extra["critic_save"] == str(pair / "critic")
    prints = meta.extra["fingerprints"]
    assert set(prints) == {"model", "tokenizer", "dataset", "reference"}
    # PPO has no reference model.
    assert prints.pop("reference") is None
    assert all(prints.values())
    assert (
        meta.extra["model_shape"]["num_layers"]
        == json.loads((task / "model/config.json").read_text())["num_hidden_layers"]
    )
    assert meta.extra["data_position"] == {"rollouts": 1, "prompts_seen": 32, "epoch": 0}
    assert meta.seeds == {"seed": 1, "rollout_seed": 1}


def test_a_critic_may_begin_from_its_actor(task: Path, pair: Path, tmp_path: Path) -> None:
    load = {"checkpoint.load": str(pair / "actor"), "batch.num_rollout": 2}
    with pytest.raises(ResumeError) as caught:
        ppo(task, tmp_path / "refused", **load)
    (problem,) = caught.value.problems
    assert problem.id == "resume-critic-lost"
    assert str(pair / "critic") in problem.fix
    assert not (tmp_path / "refused").exists()

    resumed = ppo(task, tmp_path / "resumed", **load, **{"critic.critic_load": str(pair / "critic")})
    anew = ppo(task, tmp_path / "anew", **load, **{"critic.critic_init_from_actor": True})
    assert [step["step"] for step in anew.metrics] == [2]
    # The actor is the same, and so are its samples; the critic has forgotten what it knew.
    assert [row["response"] for row in anew.samples[-1]] == [row["response"] for row in resumed.samples[-1]]
    assert anew.metrics[0]["value_loss"] != resumed.metrics[0]["value_loss"]
    assert "a new value head" in anew.screen


def test_a_critic_from_its_actor_has_its_backbone_and_a_new_head(task: Path, pair: Path) -> None:
    actor, critic = build(Run("policy", task / "model")), build(Run("value", task / "model"))
    head = critic.value_head()
    folder = pair / "actor/iter_0000001"
    actor.load(folder)
    critic.load_weights(folder)
    ours = dict(critic.model.named_parameters())
    for name, parameter in actor.model.named_parameters():
        if not name.startswith("output_layer."):
            assert torch.equal(parameter, ours[name]), name
    assert torch.equal(critic.value_head(), head)
