"""Mixtures of experts over ranks: what is computed does not depend on which rank has which expert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.experts import route_in_turn
from relax_cli.backends.megatron.micro_batch import MicroBatch, ModelOutput
from relax_cli.models.hf import HfWeights
from relax_cli.models.lora import Lora
from tests.support.tiny_models import on_ranks, save_tiny_model
from tests.support.training_runs import PROMPT_LENS, RESPONSE_LENS, ROWS, Run, build, micro_batches, samples, train

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


@pytest.mark.parametrize(("kind", "idle"), [("policy", False), ("value", True)])
def test_two_expert_parallel_ranks_equal_one(moe: Path, kind: Any, idle: bool) -> None:
    run = Run(kind, moe)
    alone, ranks = train(0, 1, 0, run), on_ranks(2, train, replace(run, layout=EP2, idle_second_rank=idle))
    same(alone, ranks[0])
    assert ranks[0]["losses"] == ranks[1]["losses"]


@pytest.mark.parametrize("stages", [1, 2])
def test_expert_parallelism_goes_with_other_kinds(moe: Path, stages: int) -> None:
    # Without stages, two ranks have the same experts and share their moments.
    run, uneven = Run("policy", moe), {"decoder_last_pipeline_num_layers": 1} if stages > 1 else {}
    shared = {"use_distributed_optimizer": True}
    split = replace(run, layout=EP2 | uneven, pipeline_parallel=stages, optimizer=shared)
    same(train(0, 1, 0, run), on_ranks(4, train, split)[0])


@pytest.mark.parametrize(("kind", "ranks", "layout"), [("policy", 2, EP2), ("value", 2, {}), ("policy", 4, EP2)])
def test_tensor_parallel_ranks_have_whole_experts(moe: Path, kind: Any, ranks: int, layout: dict[str, Any]) -> None:
    # Experts are shared out over the tensor-parallel ranks, are on both of them, or go across data-parallel ones.
    run = Run(kind, moe, packed=ranks == 4)
    shared = {"use_distributed_optimizer": ranks == 4}
    split = replace(run, tensor_parallel=2, layout=layout | {"sequence_parallel": True}, optimizer=shared)
    same(train(0, 1, 0, run), on_ranks(ranks, train, split)[0])


@pytest.mark.parametrize("experts", [EP2, {}])
def test_a_checkpoint_moves_to_tensor_parallel_ranks(experts: dict[str, Any], tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "qwen3_moe")
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    run = Run("policy", tmp_path / "model", steps=2, save_after=1)
    split = {"tensor_parallel": 2, "layout": {"sequence_parallel": True} | experts}
    expected = train(0, 1, 0, replace(run, steps=4))
    train(0, 1, 0, replace(run, save=tmp_path / "one"))
    on_ranks(2, train, replace(run, load=tmp_path / "one", save=tmp_path / "two", **split))
    after = train(0, 1, 0, replace(run, load=tmp_path / "two"))
    np.testing.assert_allclose(after["losses"], expected["losses"][2:], atol=1e-5)
    for name, weights in expected["state"].items():
        np.testing.assert_allclose(after["state"][name], weights, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("dense", "first", "second"), [([1], 2, 1), ([], 1, 2)])
def test_a_checkpoint_moves_to_another_size(dense: list[int], first: int, second: int, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "qwen3_moe", layers=2, mlp_only_layers=dense)
    (saved_in := tmp_path / "saved").mkdir()
    shared = {"use_distributed_optimizer": True}
    whole = Run("policy", tmp_path / "model", steps=3)

    def trained(ranks: int, run: Run) -> dict[str, Any]:
        if ranks == 1:
            return train(0, 1, 0, run)
        return on_ranks(ranks, train, replace(run, layout=EP2, optimizer=shared))[0]  # type: ignore[no-any-return]

    before = trained(first, replace(whole, steps=2, save=saved_in, save_after=1))
    after, expected = trained(second, replace(whole, steps=2, load=saved_in)), train(0, 1, 0, whole)
    for name in ("losses", "grad_norms"):
        np.testing.assert_allclose([*before[name][:1], *after[name]], expected[name], atol=1e-5, err_msg=name)
    for name, weights in expected["state"].items():
        np.testing.assert_allclose(after["state"][name], weights, atol=1e-5, err_msg=name)


def nothing(output: ModelOutput, _: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return output.log_probs_BT.sum() * 0.0, {}


@pytest.mark.parametrize("packed", [False, True])
def test_the_auxiliary_loss_equals_its_formula(packed: bool, tmp_path: Path) -> None:
    reference = save_tiny_model(tmp_path, "qwen3_moe")
    model = build(Run("policy", tmp_path, layout={"moe_aux_loss_coeff": 0.1}))
    tokens = sum(PROMPT_LENS) + sum(RESPONSE_LENS) - len(ROWS)
    losses = []
    for batch in micro_batches(4, ROWS):
        end_B = batch.prompt_lens_B + batch.response_lens_B - 1
        here_BS = torch.arange(batch.tokens_BS.size(1)) < end_B[:, None]
        # Only states that predict response tokens reach the last layer's experts.
        last_BS = here_BS & (torch.arange(batch.tokens_BS.size(1)) >= batch.prompt_lens_B[:, None] - 1)
        logits = reference(batch.tokens_BS, output_router_logits=True).router_logits
        for scores, mask in zip(logits, (here_BS, last_BS), strict=True):
            probs_NE = scores.softmax(-1)[mask.flatten()]
            used_NE = torch.zeros_like(probs_NE).scatter(1, probs_NE.topk(2).indices, 1.0)
            losses.append(4 * (used_NE.mean(0) / 2 * probs_NE.mean(0)).sum() * end_B.sum() / tokens)
    (0.1 * sum(losses)).backward()
    step = model.train_step(micro_batches(4, ROWS, packed), nothing)
    assert step.load_balancing_loss == pytest.approx(float(sum(losses)) / 2, rel=1e-5)
    ours = {name: p.main_grad for name, p in model.model.named_parameters()}
    for layer in range(2):
        theirs = reference.model.layers[layer].mlp.gate.weight.grad
        torch.testing.assert_close(ours[f"decoder.layers.{layer}.mlp.router.weight"], theirs, atol=1e-7, rtol=1e-4)
    torch.testing.assert_close(
        ours["embedding.word_embeddings.weight"], reference.model.embed_tokens.weight.grad, atol=1e-7, rtol=1e-4
    )


def test_the_auxiliary_loss_does_not_depend_on_ranks(moe: Path) -> None:
    # Of single samples: the loss of a micro-batch is about its own tokens.
    balanced = {"moe_aux_loss_coeff": 0.1}
    run = Run("policy", moe, micro_batch_size=1, layout=balanced)
    alone, ranks = train(0, 1, 0, run), on_ranks(2, train, replace(run, layout=balanced | EP2))
    same(alone, ranks[0])
    assert alone["grad_norms"] != train(0, 1, 0, replace(run, layout={}))["grad_norms"]


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    ],
)
def test_recomputed_experts_change_nothing(moe: Path, recompute: dict[str, Any]) -> None:
    kept, again = (
        train(0, 1, 0, Run("policy", moe, layout={"moe_aux_loss_coeff": 0.1} | more)) for more in ({}, recompute)
    )
    same(kept, again, tolerance=1e-6)
    assert kept["balance"] == pytest.approx(again["balance"], abs=1e-6)


def test_the_router_can_be_more_exact(moe: Path) -> None:
    exact, usual = (build(Run("policy", moe, layout={"moe_router_dtype": dtype})) for dtype in ("fp64", "fp32"))
    one, other = (model.forward([samples(ROWS)])[0].log_probs_BT for model in (exact, usual))
    torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    assert one.dtype == other.dtype == torch.float32


def test_adapters_in_the_attention_leave_experts_alone(moe: Path) -> None:
    lora = Lora(4, 8.0, ("linear_qkv", "linear_proj"))
    trained, stored = train(0, 1, 0, Run("policy", moe, lora=lora, lr=1e-2))["state"], dict(HfWeights(moe))
    changed = {name.split(".", 3)[-1] for name in stored if not np.array_equal(trained[name], stored[name].numpy())}
    assert changed == {f"self_attn.{part}_proj.weight" for part in "qkvo"}


def test_ranks_without_experts_to_train_join_on_the_device(moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, devices = build(Run("policy", moe)).optimizer, []
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, **_: devices.append(tensor.device.type))
    optimizer.masters.parameters = [torch.empty(1, device="meta")]
    with pytest.raises(RuntimeError, match="meta"):  # nothing can be read there
        optimizer._squared_norm([], parallel.TENSOR.group)
    assert devices == ["meta"]


def test_simulated_routing_gives_experts_equally_many_tokens(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3_moe", num_experts_per_tok=3)
    model = build(Run("policy", tmp_path))
    route_in_turn(model.model)
    counts: list[list[int]] = []
    experts = model.model.decoder.layers[0].mlp.experts
    experts.register_forward_hook(lambda _, given, __: counts.append(given[1].tolist()))
    tokens = torch.zeros(4, 9, dtype=torch.int64)
    model.forward([MicroBatch(tokens, torch.full((4,), 5), torch.full((4,), 4))])
    assert counts == [[4 * 8 * 3 // 4] * 4]


def publish(rank: int, ranks: int, port: int, run: Run) -> list[dict[str, Any]]:
    model = build(run, rank, ranks, port)
    buckets = [{name: tensor.numpy().copy() for name, tensor in bucket.tensors} for bucket in model.hf_buckets(20_000)]
    parallel.shutdown()
    return buckets


def test_every_rank_publishes_every_expert_by_itself(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3_moe")
    first, second = on_ranks(2, publish, Run("policy", tmp_path, layout=EP2))
    assert len(first) == len(second) > 2
    stored = {name: tensor.numpy() for name, tensor in HfWeights(tmp_path).items()}
    for buckets in (first, second):
        sent = {name: array for bucket in buckets for name, array in bucket.items()}
        assert sent.keys() == stored.keys()
        assert all(np.array_equal(sent[name], stored[name]) for name in stored)
    # SGLang's loader of Qwen3-MoE finds an expert by this part of a name, and the router by its own.
    parts = [f"experts.{expert}.{matrix}_proj.weight" for expert in range(4) for matrix in ("gate", "up", "down")]
    assert {name.partition("mlp.")[2] for name in stored if "mlp." in name} == {*parts, "gate.weight"}
