"""Small pieces of a run: the command it ends with, weights on their way through Ray."""

from __future__ import annotations

import warnings

import pytest
import torch

from relax_cli.engine.ray.ranks import as_arrays, as_tensors
from relax_cli.engine.run import without_options


def test_an_option_is_removed_from_a_command_with_its_value() -> None:
    words = ["--recipe", "a.yaml", "--run-dir", "x", "--strict", "--load", "y", "--set", "run.seed=1"]
    assert without_options(words, {"--run-dir", "--load"}) == ["--recipe", "a.yaml", "--strict", "--set", "run.seed=1"]
    assert without_options(words, set()) == words


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_published_weights_come_back_bit_by_bit(dtype: torch.dtype) -> None:
    fused = torch.randn(6, 4).to(dtype)
    named = {"matrix": fused[:3], "columns": fused[:, 1:3], "vector": torch.randn(5).to(dtype)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = dict(as_tensors(as_arrays(named)))
    assert back.keys() == named.keys()
    assert all(back[name].dtype == dtype and torch.equal(back[name], named[name]) for name in named)
