"""Pipeline stages on gloo: the same losses, gradient norms and weights as one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_cli.backends.ports import lasting_port
from relax_cli.models.lora import Lora
from tests.support.tiny_models import on_ranks, save_tiny_model
from tests.support.training_runs import Run, train

UNEVEN = {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 1}
LORA = Lora(4, 8.0, ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "2 stages, 2 shares": {"pipeline_parallel": 2},
    "4 stages": {"pipeline_parallel": 4, "micro_batch_size": 1},
    "2 x 2 stages": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "sequence parallel": {"tensor_parallel": 2, "pipeline_parallel": 2, "layout": {"sequence_parallel": True}},
    "uneven": {"pipeline_parallel": 2, "layout": {"decoder_first_pipeline_num_layers": 3}},
    "chunks": {"tensor_parallel": 2, "pipeline_parallel": 2, "layout": {"log_probs_chunk_size": 3}},
    "recomputed": {"pipeline_parallel": 2, "layout": FULL},
    "one share has no samples": {"pipeline_parallel": 2, "idle_second_rank": True},
    "shared optimizer": {"pipeline_parallel": 2, "optimizer": {"use_distributed_optimizer": True}},
    "optimizer on the host": {"pipeline_parallel": 2, "optimizer": {"optimizer_cpu_offload": True}},
    "adapters": {"tensor_parallel": 2, "pipeline_parallel": 2, "lora": LORA},
    "adapters, recomputed": {"pipeline_parallel": 4, "lora": LORA, "layout": FULL},
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "qwen3", tied=request.param, layers=4)
    return folder


def train_each(rank: int, ranks: int, _: int, runs: list[tuple[Run, int]]) -> list[dict[str, Any]]:
    return [train(rank, ranks, port, run) for run, port in runs]


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_stages_train_like_one_process(kind: Any, model: Path) -> None:
    runs = {name: replace(Run(kind, model), **changes) for name, changes in LAYOUTS.items()}
    alone = {lora: train(0, 1, 0, replace(Run(kind, model), lora=lora)) for lora in (None, LORA)}
    results = on_ranks(4, train_each, [(run, lasting_port()) for run in runs.values()])
    for position, (name, run) in enumerate(runs.items()):
        for rank, of_rank in enumerate(results):
            assert_same(of_rank[position], alone[run.lora], f"{name}, rank {rank}", first=rank == 0)


def assert_same(result: dict[str, Any], alone: dict[str, Any], where: str, *, first: bool) -> None:
    np.testing.assert_allclose(result["losses"], alone["losses"], atol=1e-5, err_msg=where)
    np.testing.assert_allclose(result["grad_norms"], alone["grad_norms"], rtol=1e-5, err_msg=where)
    np.testing.assert_allclose(result["grid"], alone["grid"], atol=1e-5, err_msg=where)
    if alone["head"] is not None:
        np.testing.assert_allclose(result["head"], alone["head"], atol=1e-5, err_msg=where)
    elif not first:
        assert result["state"] is None, "one rank hands out the weights"
    else:
        assert result["state"].keys() == alone["state"].keys()
        for weight, values in alone["state"].items():
            np.testing.assert_allclose(result["state"][weight], values, atol=1e-5, err_msg=f"{where}, {weight}")
