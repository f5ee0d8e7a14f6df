"""Mixtures of experts over ranks: what is computed does not depend on which rank has which expert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny_models import on_ranks, save_tiny_model
from tests.support.training_runs import Run, train

EP2 = {"expert_model_parallel_size": 2}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    save_tiny_model(folder, "qwen3_moe", layers=3, mlp_only_layers=[1])
    return folder


def same(one: dict[str, Any], two: dict[str, Any], tolerance: float = 1e-5) -> None:
    for name in ("losses", "grad_norms", "lrs", "grid"):
        np.testing.assert_allclose(one[name], two[name], rtol=0, atol=tolerance, err_msg=name)
    for name, weights in (one["state"] or {}).items():
        np.testing.assert_allclose(weights, two["state"][name], rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_two_expert_parallel_ranks_equal_one(moe: Path, kind: Any) -> None:
    run = Run(kind, moe)
    alone, ranks = train(0, 1, 0, run), on_ranks(2, train, replace(run, layout=EP2))
    same(alone, ranks[0])
    assert ranks[0]["losses"] == ranks[1]["losses"]


def test_ranks_may_have_other_numbers_of_micro_batches(moe: Path) -> None:
    run = Run("policy", moe)
    same(train(0, 1, 0, run), on_ranks(2, train, replace(run, layout=EP2, idle_second_rank=True))[0])


def test_two_copies_of_each_expert_share_their_optimizer(moe: Path) -> None:
    run = Run("policy", moe)
    split = replace(run, layout=EP2, optimizer={"use_distributed_optimizer": True})
    same(train(0, 1, 0, run), on_ranks(4, train, split)[0])


@pytest.mark.parametrize("dense", [[1], []])
def test_a_checkpoint_moves_between_numbers_of_ranks(dense: list[int], tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "qwen3_moe", layers=2, mlp_only_layers=dense)
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    whole = Run("policy", tmp_path / "model", steps=4)
    split = replace(whole, layout=EP2, optimizer={"use_distributed_optimizer": True})
    saved = on_ranks(2, train, replace(split, steps=2, save=tmp_path / "two", save_after=1))[0]
    alone = train(0, 1, 0, replace(whole, steps=2, load=tmp_path / "two", save=tmp_path / "one", save_after=1))
    again = on_ranks(2, train, replace(split, steps=2, load=tmp_path / "one"))[0]
    expected = train(0, 1, 0, whole)
    for name in ("losses", "grad_norms"):
        found = [*saved[name][:1], *alone[name][:1], *again[name]]
        np.testing.assert_allclose(found, expected[name], atol=1e-5, err_msg=name)
    for name, weights in expected["state"].items():
        np.testing.assert_allclose(again["state"][name], weights, atol=1e-5, err_msg=name)
