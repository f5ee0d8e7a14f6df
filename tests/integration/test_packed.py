"""`--pack-sequences`: samples in one row without padding give the numbers of right-padded ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from relax_cli.backends.megatron import context, parallel
from relax_cli.backends.megatron.layers import PackedSamples
from relax_cli.backends.megatron.loaded import run_batch
from relax_cli.backends.megatron.trainer import MicroBatch, TrainableModel
from relax_cli.models.lora import Lora
from tests.support.tiny_models import on_ranks, save_tiny_model
from tests.support.training_runs import (
    PROMPT_LENS,
    RECOMPUTE,
    RESPONSE_LENS,
    ROWS,
    Run,
    assert_close,
    build,
    loss_fn,
    samples,
    train,
)

KINDS = ("policy", "value")
LAYOUTS = {
    "plain": {},
    "all recomputed": RECOMPUTE["uniform"],
    "attention recomputed": RECOMPUTE["attention"],
    "chunked logits": {"log_probs_chunk_size": 4},
}
SPLIT: dict[str, Any] = {"sequence_parallel": True}
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(folder, "qwen3", tied=True)
    return folder


def pass_through(model: TrainableModel, packed: bool, rows: list[int]) -> tuple[torch.Tensor, float, dict[str, Any]]:
    """Outputs, loss and gradients of one micro-batch whose mask has a hole in every response of several tokens."""
    batch = replace(samples(rows), packed=packed)
    batch.fields["mask"][:, 1:2] = False
    model.ddp.zero_grad_buffer()
    if model.kind == "policy":
        model.model.entropy_grad = True
    output = run_batch(model.ddp, batch)
    loss = loss_fn(output, batch)[0]
    (loss + 0.1 * output.entropy_BT.mean() if model.kind == "policy" else loss).backward()
    gradients = {n: p.main_grad.clone() for n, p in model.model.named_parameters() if p.requires_grad}
    return output.main.detach(), float(loss.detach()), gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lora", [None, Lora(2, 4.0, ("linear_qkv", "linear_fc2"))], ids=["all weights", "adapters"])
def test_packed_samples_give_the_padded_numbers(kind: str, layout: str, lora: Lora | None, qwen3: Path) -> None:
    model = build(Run(kind, qwen3, layout=LAYOUTS[layout], lora=lora))  # type: ignore[arg-type]
    # All, in another order, several of one length, one with a single token of response, alone.
    for rows in (ROWS, [4, 0, 2], [0, 0, 1, 1, 5], [4]):
        (padded, padded_loss, gradients), (packed, packed_loss, found) = (
            pass_through(model, is_packed, rows) for is_packed in (False, True)
        )
        torch.testing.assert_close(packed, padded, rtol=0, atol=TOLERANCE)
        assert packed_loss == pytest.approx(padded_loss, abs=TOLERANCE)
        for name, gradient in gradients.items():
            scale = max(float(gradient.abs().max()), 1e-3)
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=TOLERANCE * scale, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_neighbours_do_not_change_a_sample(kind: str, qwen3: Path) -> None:
    model = build(Run(kind, qwen3))  # type: ignore[arg-type]
    together = model.forward([replace(samples(ROWS), packed=True)])[0].main
    for row, length in enumerate(RESPONSE_LENS):
        batch = samples(ROWS)
        # All tokens of all others are different.
        others = torch.arange(len(ROWS)) != row
        batch.tokens_BS[others] = (batch.tokens_BS[others] + 7) % 90
        changed = model.forward([replace(batch, packed=True)])[0].main
        assert torch.equal(changed[row], together[row])
        assert not changed[row, length:].any()


def test_packed_positions_restart_and_count_no_padding() -> None:
    packed = PackedSamples.of([4, 4, 2, 1], 2, torch.device("cpu"))
    assert packed.positions_S is not None
    assert packed.positions_S.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 0, 1, 2]
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, 4, 8, 10, 13]
    assert packed.cu_seqlens_q.dtype == torch.int32
    assert (packed.qkv_format, packed.max_seqlen_q, packed.max_seqlen_kv) == ("thd", 4, 4)
    assert packed.runs == ((4, 2), (2, 1), (3, 1))
    tokens, response = replace(samples(ROWS), packed=True).laid_out()
    assert tokens.shape == (1, sum(PROMPT_LENS) + sum(RESPONSE_LENS) - len(ROWS))
    assert response.lengths == (8, 7, 6, 6, 6, 5)


def test_context_parallel_ranks_get_pieces_from_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "CONTEXT", SimpleNamespace(size=2))
    assert context.places_by_rank([8, 4], torch.device("cpu")).tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    tokens, response = replace(samples(ROWS), packed=True).laid_out(context.pieces())
    assert response.lengths == (8, 8, 8, 8, 8, 8)
    packed = PackedSamples.of(response.lengths, tokens.size(1) - 48, torch.device("cpu"))
    # TransformerEngine divides both by the ranks, and compares them: there is nothing between the samples.
    assert torch.equal(packed.cu_seqlens_q_padded, packed.cu_seqlens_q)
    assert torch.equal(packed.cu_seqlens_kv_padded, packed.cu_seqlens_kv)
    # The tokens that predict responses are these, wherever they are; the ranks have all of them once.
    parts = [response.within(places, 48) for places in context.places_by_rank(response.lengths, torch.device("cpu"))]
    assert sorted(torch.cat([part.cells_N for part in parts]).tolist()) == response.cells_N.tolist()
    for part, places in zip(parts, context.places_by_rank(response.lengths, torch.device("cpu")), strict=True):
        whole = dict(zip(response.cells_N.tolist(), response.states_N.tolist(), strict=True))
        assert places[part.states_N].tolist() == [whole[cell] for cell in part.cells_N.tolist()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout", [{}, {"sequence_parallel": True}, {"sequence_parallel": True, **RECOMPUTE["uniform"]}]
)
def test_packed_tensor_parallel_ranks_train_like_one(kind: str, layout: dict[str, Any], qwen3: Path) -> None:
    # 19 and 13 tokens in a micro-batch: sequence parallelism fills them up.
    run = Run(kind, qwen3, micro_batch_size=3)  # type: ignore[arg-type]
    ranks = on_ranks(2, train, replace(run, tensor_parallel=2, layout=layout, packed=True))
    assert_close(ranks, train(0, 1, 0, run))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_data_parallel_ranks_train_like_one(kind: str, qwen3: Path) -> None:
    run = Run(kind, qwen3)  # type: ignore[arg-type]
    assert_close(on_ranks(2, train, replace(run, packed=True)), train(0, 1, 0, run))


def test_packed_samples_without_a_response_change_nothing(qwen3: Path) -> None:
    model = build(Run("policy", qwen3))
    batch = MicroBatch(torch.tensor([[3, 0], [4, 5]]), torch.tensor([1, 2]), torch.tensor([0, 0]), packed=True)
    result = model.train_step([batch], lambda output, _: (output.log_probs_BT.sum(), {}))
    assert (result.grad_norm, result.skipped) == (0.0, False)
    np.testing.assert_equal(model.forward([batch])[0].main.shape, (2, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_pipeline_stages_train_like_one_rank(kind: str, qwen3: Path) -> None:
    run = Run(kind, qwen3)  # type: ignore[arg-type]
    assert_close(on_ranks(2, train, replace(run, pipeline_parallel=2, packed=True)), train(0, 1, 0, run))
