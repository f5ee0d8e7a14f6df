"""Adapters in the Megatron trainer: equal to a hand-merged model, alone in training, exact in checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from relax_cli.backends.megatron import lora as adapters
from relax_cli.backends.megatron.trainer import TrainableModel
from relax_cli.models.convert import megatron_to_hf, merged
from relax_cli.models.hf import write_hf
from relax_cli.models.lora import HF_MODULES, Lora
from relax_cli.models.spec import read_spec
from tests.support.tiny_models import on_ranks, save_tiny_model
from tests.support.training_runs import ROWS, Run, build, loss_fn, micro_batches, rows_of_rank, train

LORA = Lora(rank=3, alpha=12.0, targets=tuple(HF_MODULES))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(folder, "qwen3", tied=True)
    return folder


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2")
    save_tiny_model(folder, "qwen2")
    return folder


def moved(run: Run) -> TrainableModel:
    """A model whose adapters are no longer 0."""
    model = build(run)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if adapters.is_adapter(name):
                parameter.normal_(0.0, 0.1, generator=generator)
    return model


def names_in(checkpoint: Path) -> set[str]:
    return set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_new_adapters_change_nothing(kind: Any, qwen3: Path) -> None:
    whole, adapted = (build(Run(kind, qwen3, lora=lora)).forward(micro_batches(6, ROWS))[0] for lora in (None, LORA))
    assert torch.equal(whole.main, adapted.main)


@pytest.mark.parametrize("target", HF_MODULES)
def test_answers_equal_those_of_a_hand_merged_model(target: str, qwen2: Path, tmp_path: Path) -> None:
    """`q_proj + α/r · B_q A` and so on, written as an ordinary model folder."""
    model = moved(Run("policy", qwen2, lora=replace(LORA, targets=(target,))))
    spec = read_spec(qwen2)
    full = {name: p.detach() for name, p in model.model.parameters_by_name().items()}
    for name, layer in adapters.adapted_layers(model.model).items():
        assert f".{target}." in name
        full[name] = full[name] + 12.0 / 3 * layer.lora_b.detach() @ layer.lora_a.detach()
    write_hf(tmp_path / "merged", megatron_to_hf(full, spec), qwen2)
    by_hand = build(Run("policy", tmp_path / "merged")).forward(micro_batches(6, ROWS))[0]
    found = model.forward(micro_batches(6, ROWS))[0]
    torch.testing.assert_close(found.log_probs_BT, by_hand.log_probs_BT, atol=1e-6, rtol=0)
    assert (found.log_probs_BT - build(Run("policy", qwen2)).forward(micro_batches(6, ROWS))[0].log_probs_BT).any()


def test_published_weights_are_those_it_computes_with(qwen3: Path, tmp_path: Path) -> None:
    model = moved(Run("policy", qwen3, lora=LORA))
    state = model.hf_state()
    assert state is not None
    write_hf(tmp_path, state.items(), qwen3)
    again = build(Run("policy", tmp_path)).forward(micro_batches(6, ROWS))[0]
    assert torch.equal(model.forward(micro_batches(6, ROWS))[0].main, again.main)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_are_those_of_the_merged_product(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    shapes = ((5, 2, 7), (6, 7), (3, 7), (6, 3))
    x, weight, a, b = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    grad = torch.randn(5, 2, 6, dtype=dtype)
    found = torch.autograd.grad(adapters._LowRank.apply(x, weight.detach(), a, b, 4.0), (x, a, b), grad)
    expected = torch.autograd.grad(x @ (weight + 4.0 * b @ a).T, (x, a, b), grad)
    tolerance = 1e-12 if dtype == torch.float64 else 5e-2
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


def test_a_small_change_is_rounded_as_it_is_published() -> None:
    weight = torch.ones(4, 4, dtype=torch.bfloat16)
    small = torch.full((4, 1), 1e-2, dtype=torch.bfloat16)
    assert torch.equal(merged(weight, small.T, small, 1.0), weight)
    torch.testing.assert_close(
        merged(weight.float(), small.T.float(), small.float(), 1.0) - 1, torch.full((4, 4), 1e-4), atol=2e-6, rtol=0
    )


@pytest.mark.parametrize("kind", ["policy", "value"])
@pytest.mark.parametrize("layout", [{}, {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}])
def test_only_adapters_and_a_value_head_are_trained(kind: Any, layout: dict[str, Any], qwen3: Path) -> None:
    if layout.get("recompute_granularity") == "full":
        layout = layout | {"recompute_method": "uniform", "recompute_num_layers": 1}
    elif layout:
        layout = layout | {"recompute_modules": ("core_attn", "mlp")}
    model = build(Run(kind, qwen3, lora=LORA, layout=layout, optimizer={"weight_decay": 0.1}))
    before = {name: p.detach().clone() for name, p in model.model.named_parameters()}
    for _ in range(2):
        model.train_step(micro_batches(2, rows_of_rank(Run(kind, qwen3))), loss_fn)
    changed = {name for name, p in model.model.named_parameters() if not torch.equal(p, before[name])}
    trained = {name for name in before if adapters.is_adapter(name) or name.startswith("output_layer.")}
    assert changed == trained
    held = sum(before[name].numel() for name in trained)
    assert sum(tensor.numel() for tensor in model.optimizer.tensors()) == 3 * held
    assert LORA.parameters(read_spec(qwen3)) == sum(before[n].numel() for n in trained if adapters.is_adapter(n))


@pytest.mark.parametrize("layout", [{}, {"sequence_parallel": True}])
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_two_tensor_parallel_ranks_train_adapters_like_one(kind: Any, layout: dict[str, Any], qwen2: Path) -> None:
    one = train(0, 1, 0, Run(kind, qwen2, lora=LORA))
    two = on_ranks(2, train, Run(kind, qwen2, lora=LORA, tensor_parallel=2, layout=layout))
    for rank in two:
        np.testing.assert_allclose(rank["losses"], one["losses"], rtol=1e-5)
        np.testing.assert_allclose(rank["grad_norms"], one["grad_norms"], rtol=1e-4)
        np.testing.assert_allclose(rank["grid"], one["grid"], atol=1e-5)
    if kind == "policy":
        for name, weight in one["state"].items():
            np.testing.assert_allclose(two[0]["state"][name], weight, atol=1e-5)


def test_two_data_parallel_ranks_share_out_the_adapters(qwen2: Path) -> None:
    one = train(0, 1, 0, Run("policy", qwen2, lora=LORA))
    for rank in on_ranks(2, train, Run("policy", qwen2, lora=LORA, optimizer={"use_distributed_optimizer": True})):
        np.testing.assert_allclose(rank["losses"], one["losses"], rtol=1e-5)
        np.testing.assert_allclose(rank["grid"], one["grid"], atol=1e-5)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_four_steps_are_two_and_two_resumed(kind: Any, bf16: bool, qwen3: Path, tmp_path: Path) -> None:
    run = Run(kind, qwen3, lora=LORA, bf16=bf16, steps=4)
    straight = train(0, 1, 0, replace(run, save=tmp_path, save_after=2))
    resumed = train(0, 1, 0, replace(run, load=tmp_path, steps=2))
    assert resumed["losses"] == straight["losses"][2:]
    assert np.array_equal(resumed["grid"], straight["grid"])
    saved = {name for name in names_in(tmp_path) if not name.startswith("optimizer.")}
    assert all(name.endswith((".lora_a", ".lora_b")) or name.startswith("output_layer.") for name in saved), saved


def test_a_checkpoint_of_adapters_loads_at_another_size(qwen2: Path, tmp_path: Path) -> None:
    run = Run("policy", qwen2, lora=LORA, steps=4)
    straight = train(0, 1, 0, replace(run, save=tmp_path, save_after=2))
    resumed = on_ranks(2, train, replace(run, load=tmp_path, steps=2, tensor_parallel=2))
    np.testing.assert_allclose(resumed[0]["losses"], straight["losses"][2:], rtol=1e-5)
    np.testing.assert_allclose(resumed[0]["grid"], straight["grid"], atol=1e-5)
