"""Pipeline stages and context parallelism on gloo: losses, gradient norms, weights and checkpoints of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_cli.backends.ports import lasting_port
from relax_cli.models.lora import Lora
from tests.support.tiny_models import on_ranks, save_tiny_model
from tests.support.training_runs import RECOMPUTE, Run, train

LORA = Lora(4, 8.0, ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))
GRID = {"tensor_parallel": 2, "pipeline_parallel": 2}
SHARED = {"use_distributed_optimizer": True}
PARTS = {"context_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "two shares of samples": {"pipeline_parallel": 2},
    "four stages": {"pipeline_parallel": 4, "micro_batch_size": 1},
    "sequence parallel": {**GRID, "layout": {"sequence_parallel": True}},
    "uneven": {"pipeline_parallel": 2, "layout": {"decoder_first_pipeline_num_layers": 3}},
    "chunks of logits": {**GRID, "layout": {"log_probs_chunk_size": 3}},
    "packed, recomputed": {"pipeline_parallel": 2, "packed": True, "layout": RECOMPUTE["uniform"]},
    "one share is empty": {"pipeline_parallel": 2, "idle_second_rank": True},
    "shared optimizer": {"pipeline_parallel": 2, "optimizer": SHARED},
    "adapters": {**GRID, "lora": LORA},
    "adapters, recomputed": {"pipeline_parallel": 4, "lora": LORA, "layout": RECOMPUTE["uniform"]},
    "experts": {"pipeline_parallel": 2, "layout": {"expert_model_parallel_size": 2}},
    "parts of samples": {"layout": PARTS, "packed": True, "optimizer": SHARED},
    "parts, one share is empty": {"layout": PARTS, "idle_second_rank": True},
    "parts in stages": {"pipeline_parallel": 2, "packed": True, "layout": {**PARTS, **RECOMPUTE["uniform"]}},
    "parts in stages, padded": {"pipeline_parallel": 2, "layout": PARTS, "lora": LORA},
    "parts, tensor parallel": {
        "tensor_parallel": 2,
        "packed": True,
        "layout": {**PARTS, "sequence_parallel": True, "log_probs_chunk_size": 3},
    },
    "parts, tensor parallel, padded": {"tensor_parallel": 2, "layout": PARTS},
    # Responses are shorter than a part, so that some ranks have none of their tokens.
    "four parts": {"micro_batch_size": 1, "layout": {"context_parallel_size": 4, **RECOMPUTE["attention"]}},
    "experts in parts": {"packed": True, "layout": {**PARTS, "expert_model_parallel_size": 4}},
}
CHOSEN = {
    ("policy", "untied"): ["two shares of samples", "four stages", "sequence parallel", "uneven"],
    ("policy", "tied"): [name for name in LAYOUTS if "experts" not in name],
    ("policy", "experts"): ["experts", "experts in parts"],
    ("value", "tied"): [
        *("four stages", "sequence parallel", "adapters, recomputed", "shared optimizer"),
        *("parts in stages", "parts, tensor parallel, padded", "four parts"),
    ],
}
CHAIN: tuple[dict[str, Any], ...] = (
    {"layout": PARTS, "optimizer": SHARED},
    GRID,
    {"pipeline_parallel": 4},
    {"pipeline_parallel": 2, "optimizer": SHARED},
    {"tensor_parallel": 2, "layout": {"sequence_parallel": True}},
    {"pipeline_parallel": 2, "packed": True, "layout": PARTS},
)
"""Layouts that a checkpoint passes through, from one process and back to one."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for tied in (False, True):
        save_tiny_model(folder / ("tied" if tied else "untied"), "qwen3", tied=tied, layers=4)
    save_tiny_model(folder / "experts", "qwen3_moe", layers=4, mlp_only_layers=[1])
    return {path.name: path for path in folder.iterdir()}


def train_each(rank: int, ranks: int, _: int, runs: list[tuple[Run, int]]) -> list[dict[str, Any]]:
    return [train(rank, ranks, port, run) for run, port in runs]


def spawned(runs: list[Run], ranks: int = 4) -> list[list[dict[str, Any]]]:
    """What each rank has of every run, in the order of the runs; their processes are started once."""
    return [
        list(of_run)
        for of_run in zip(*on_ranks(ranks, train_each, [(run, lasting_port()) for run in runs]), strict=True)
    ]


def assert_same(found: dict[str, Any], alone: dict[str, Any], where: str, steps: slice = slice(None)) -> None:
    for name in ("losses", "grad_norms", "lrs"):
        np.testing.assert_allclose(found[name], alone[name][steps], rtol=0, atol=1e-5, err_msg=f"{where}, {name}")
    if steps.stop is not None:
        return
    np.testing.assert_allclose(found["grid"], alone["grid"], rtol=0, atol=1e-5, err_msg=where)
    if alone["head"] is not None:
        np.testing.assert_allclose(found["head"], alone["head"], rtol=0, atol=1e-5, err_msg=where)
    for name, values in (found["state"] or {}).items():
        np.testing.assert_allclose(values, alone["state"][name], rtol=0, atol=1e-5, err_msg=f"{where}, {name}")


def test_stages_and_parts_train_like_one_process(models: dict[str, Path]) -> None:
    runs = {
        (kind, model, name): replace(Run(kind, models[model]), **LAYOUTS[name])  # type: ignore[arg-type]
        for (kind, model), names in CHOSEN.items()
        for name in names
    }
    plain = {(*key[:2], run.lora): Run(run.kind, run.model, lora=run.lora) for key, run in runs.items()}
    alone = {key: train(0, 1, 0, run) for key, run in plain.items()}
    for (key, run), results in zip(runs.items(), spawned(list(runs.values())), strict=True):
        expected = alone[(*key[:2], run.lora)]
        for rank, result in enumerate(results):
            assert_same(result, expected, f"{key}, rank {rank}")
        if run.kind == "policy":
            assert results[0]["state"].keys() == expected["state"].keys()
            assert not any(result["state"] for result in results[1:]), "one rank hands out the weights"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_eight_processes_train_like_one(kind: Any, models: dict[str, Path]) -> None:
    layouts: list[dict[str, Any]] = [GRID, {"tensor_parallel": 2, "pipeline_parallel": 4}, {"pipeline_parallel": 4}]
    shared = {"layout": {"sequence_parallel": True}, "optimizer": SHARED}
    runs = [replace(Run(kind, models["tied"]), **layout) for layout in (*layouts, {**GRID, **shared})]
    alone = train(0, 1, 0, Run(kind, models["tied"]))
    for number, results in enumerate(spawned(runs, ranks=8)):
        for rank, result in enumerate(results):
            assert_same(result, alone, f"layout {number}, rank {rank}")


@pytest.mark.parametrize(("kind", "model"), [("policy", "tied"), ("value", "untied")])
def test_a_checkpoint_moves_between_all_layouts(kind: Any, model: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Every layout takes one step, saves, and takes the step that the next one repeats from the checkpoint."""
    whole = Run(kind, models[model], steps=2, save_after=1)
    folders = [tmp_path / str(number) for number in range(len(CHAIN) + 1)]
    for folder in folders:
        folder.mkdir()
    alone = train(0, 1, 0, replace(whole, steps=len(CHAIN) + 2, save=folders[0]))
    links = [
        replace(whole, load=load, save=save, **layout)
        for layout, load, save in zip(CHAIN, folders, folders[1:], strict=False)
    ]
    for step, results in enumerate(spawned(links), 1):
        for rank, result in enumerate(results):
            assert_same(result, alone, f"layout {step}, rank {rank}", slice(step, step + 2))
    back = train(0, 1, 0, replace(whole, steps=1, load=folders[-1]))
    assert_same(back, alone, "one process again", slice(len(CHAIN) + 1, None))
