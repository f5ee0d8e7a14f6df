"""Training with the experts that tokens were generated with: what is computed, over ranks, and what it is good for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from relax_cli.backends.megatron.micro_batch import MicroBatch, ModelOutput
from relax_cli.backends.rollout.embedded.engine import EmbeddedEngine
from relax_cli.backends.rollout.protocol import Generation, Request, SamplingParams
from relax_cli.models.hf import HfWeights
from tests.support.local_runs import train as train_locally
from tests.support.quickstart import small_task
from tests.support.tiny_models import on_ranks, save_experts_for_task, save_tiny_model
from tests.support.training_runs import ROWS, Run, build, micro_batches, routes, train

REPLAY = {"router_replay": True}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    save_tiny_model(folder, "qwen3_moe", layers=3, mlp_only_layers=[1])
    return folder


def total(output: ModelOutput, _: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return output.log_probs_BT.sum(), {}


@pytest.mark.parametrize(("normalized", "packed"), [(True, False), (True, True), (False, True)])
def test_replayed_experts_equal_those_of_transformers(normalized: bool, packed: bool, tmp_path: Path) -> None:
    reference = save_tiny_model(tmp_path, "qwen3_moe", norm_topk_prob=normalized)
    wanted = routes(ROWS, 2).view(len(ROWS), -1, 2, 2)

    def forced(layer: int) -> Any:
        def hook(_: Any, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits, _, own = output
            given = wanted[:, :, layer].flatten(0, 1).long()
            chosen = torch.where(given < 0, own, given)
            scores = logits.softmax(-1).gather(1, chosen)
            return logits, scores / scores.sum(-1, keepdim=True) if normalized else scores, chosen

        return hook

    for layer, block in enumerate(reference.model.layers):
        block.mlp.gate.register_forward_hook(forced(layer))
    batch = micro_batches(6, ROWS, packed, routed=2)[0]
    logits = reference(batch.tokens_BS).logits / 0.7
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, batch.tokens_BS[:, 1:, None]).squeeze(-1)
    at = batch.prompt_lens_B[:, None] - 1 + torch.arange(batch.fields["mask"].size(1))
    theirs = torch.where(batch.fields["mask"], log_probs.gather(1, at.clamp(max=log_probs.size(1) - 1)), 0.0)
    theirs.sum().backward()
    model = build(Run("policy", tmp_path, layout=REPLAY, optimizer={"clip_grad": 1e6}))
    ours = model.forward([batch])[0].log_probs_BT
    torch.testing.assert_close(ours, theirs.detach(), atol=1e-5, rtol=0)
    assert (ours - model.forward(micro_batches(6, ROWS, packed))[0].log_probs_BT).abs().max() > 0.01
    step = model.train_step([batch], total)
    gradients = {name: p.main_grad for name, p in model.model.named_parameters()}
    for layer, block in enumerate(reference.model.layers):
        expected = block.mlp.gate.weight.grad
        torch.testing.assert_close(
            gradients[f"decoder.layers.{layer}.mlp.router.weight"], expected, atol=1e-5, rtol=1e-4
        )
    assert step.router_mismatch is not None
    assert 0.5 < step.router_mismatch < 1


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"expert_model_parallel_size": 2}),
    (2, {"pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": 1}),
    (1, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    (1, {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}),
    (2, {"context_parallel_size": 2}),
    (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2}),
    (1, {"moe_aux_loss_coeff": 0.0, "router_replay": True}),
]


@pytest.mark.parametrize(
    ("ranks", "layout"), LAYOUTS, ids=["experts", "stages", "full", "mlp", "context", "tensor", "packed"]
)
def test_routes_reach_the_experts_in_every_layout(moe: Path, ranks: int, layout: dict[str, Any]) -> None:
    run = Run("policy", moe, layout=REPLAY, routed=3)
    stages = layout.get("pipeline_model_parallel_size", 1)
    sizes = {"pipeline_model_parallel_size", "tensor_model_parallel_size"}
    more = {name: value for name, value in layout.items() if name not in sizes}
    tensor = layout.get("tensor_model_parallel_size", 1)
    packed = layout is LAYOUTS[-1][1]
    split = replace(run, layout=REPLAY | more, pipeline_parallel=stages, tensor_parallel=tensor, packed=packed)
    alone = train(0, 1, 0, run)
    other = train(0, 1, 0, split) if ranks == 1 else on_ranks(ranks, train, split)[0]
    for name in ("losses", "grad_norms", "grid", "mismatch"):
        np.testing.assert_allclose(other[name], alone[name], rtol=0, atol=1e-5, err_msg=name)
    for name, weights in alone["state"].items():
        np.testing.assert_allclose(other["state"][name], weights, rtol=0, atol=1e-5, err_msg=name)
    assert alone["losses"] != train(0, 1, 0, replace(run, routed=0))["losses"]


def test_routes_and_the_auxiliary_loss_go_together(moe: Path) -> None:
    balanced = REPLAY | {"moe_aux_loss_coeff": 0.1}
    alone = train(0, 1, 0, Run("policy", moe, layout=balanced, routed=3))
    packed = train(0, 1, 0, Run("policy", moe, layout=balanced, routed=3, packed=True))
    np.testing.assert_allclose(packed["balance"], alone["balance"], atol=1e-6)
    np.testing.assert_allclose(packed["grad_norms"], alone["grad_norms"], atol=1e-5)
    # Its own choices are what the auxiliary loss looks at: in the first layer, those of a model without routes.
    assert alone["balance"][0] == pytest.approx(train(0, 1, 0, Run("policy", moe, layout=balanced))["balance"][0], 0.2)


def sampled(folder: Path, engine: EmbeddedEngine, kind: str) -> tuple[list[Request], list[Generation]]:
    def weights(name: str, tensor: Tensor) -> Tensor:
        if kind == "stale":
            generator = torch.Generator().manual_seed(len(name))
            return tensor + 1e-3 * torch.randn(tensor.shape, generator=generator).sign()
        return tensor.bfloat16().float() if kind == "bf16" else tensor

    engine.load_weights(((name, weights(name, tensor)) for name, tensor in HfWeights(folder).items()), 1)
    requests = [Request(tuple(range(5, 5 + length)), seed) for seed, length in enumerate((3, 5, 3, 9, 7, 9) * 4)]
    return requests, engine.generate(requests, SamplingParams(24, 0.7, 1.0, -1, (3,), routes=True))


def test_replay_narrows_the_gap_to_the_engine(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3_moe", layers=4, num_experts=16)
    engine = EmbeddedEngine(tmp_path, decode=None)
    model = build(Run("policy", tmp_path, layout=REPLAY, optimizer={"clip_grad": 1e6}))
    for kind in ("exact", "bf16", "stale"):
        requests, generations = sampled(tmp_path, engine, kind)
        gaps = []
        for routed in (False, True):
            batch = as_batch(requests, generations, routed=routed)
            gap = (model.forward([batch])[0].log_probs_BT - batch.fields["log_probs"]).abs()[batch.fields["mask"]]
            gaps.append(float(gap.mean()))
        step = model.train_step([batch], lambda output, _: (output.log_probs_BT.sum() * 0.0, {}))
        if kind == "exact":
            assert max(gaps) < 1e-5
            assert step.router_mismatch == 0
            # Nothing changes where both choose alike.
            assert gaps[1] == gaps[0]
        else:
            assert gaps[1] < 0.95 * gaps[0]
            assert step.router_mismatch is not None
            assert step.router_mismatch > 0.001


def as_batch(requests: list[Request], generations: list[Generation], *, routed: bool) -> MicroBatch:
    rows = [torch.tensor([*r.prompt_tokens, *g.tokens]) for r, g in zip(requests, generations, strict=True)]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lens = torch.tensor([len(generation.tokens) for generation in generations])
    routes_BSr = torch.full((*tokens.shape, generations[0].routes[0].size), -1, dtype=torch.int16)  # type: ignore[index]
    for row, generation in zip(routes_BSr, generations, strict=True):
        assert generation.routes is not None
        row[: len(generation.routes)] = torch.from_numpy(generation.routes).flatten(1)
    log_probs = torch.nn.utils.rnn.pad_sequence([torch.tensor(g.log_probs) for g in generations], batch_first=True)
    mask = torch.arange(log_probs.size(1)) < lens[:, None]
    prompts = torch.tensor([len(request.prompt_tokens) for request in requests])
    return MicroBatch(
        tokens, prompts, lens, {"log_probs": log_probs, "mask": mask}, routes_BSr=routes_BSr if routed else None
    )


@pytest.mark.parametrize("more", [(), ("algorithm.use_rollout_logprobs=false",)])
def test_a_run_replays_what_its_engine_chose(more: tuple[str, ...], tmp_path: Path) -> None:
    small_task(tmp_path / "task")
    model = save_experts_for_task(tmp_path / "model", num_experts=16)
    words = (f"model.hf_checkpoint={model}", "batch.rollout_batch_size=16", "batch.micro_batch_size=8", *more)
    recipe, words = ("tiny-grpo-cpu", words) if more else ("tiny-ppo-cpu", (*words, "critic.num_critic_only_steps=0"))
    plain, replayed = (
        train_locally(tmp_path / "task", tmp_path / f"run{on}", recipe, *words, f"parallel.router_replay={on}")
        for on in ("false", "true")
    )
    for one, other in zip(plain.metrics, replayed.metrics, strict=True):
        assert other["router_mismatch_frac"] == 0
        assert "router_mismatch_frac" not in one
        assert other["train_rollout_logprob_diff/max"] < 1e-5
    # Later steps of a rollout go where the tokens went, not where the router would send them by now.
    assert (replayed.metrics[0]["pg_loss"] == plain.metrics[0]["pg_loss"]) == bool(more)
