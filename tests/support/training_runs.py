"""Training runs that the Megatron tests start on one or more ranks; importable by spawned processes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from relax_cli.algorithms.schedule import Schedule
from relax_cli.backends.device import select_device
from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.trainer import Build, MicroBatch, ModelOutput, TrainableModel
from relax_cli.config.schema import OptimizerSection, ParallelSection
from relax_cli.models.lora import Lora
from tests.support.tiny_models import VOCAB

PROMPT_LENS = (3, 5, 2, 4, 6, 3)
RESPONSE_LENS = (4, 2, 6, 5, 1, 3)
ROWS = list(range(6))
META = {"weight_version": 4, "seeds": {"seed": 1}, "config_hash": "abc", "data_position": {"rollouts": 17}}
"""What a checkpoint says besides its tensors."""

RECOMPUTE = {
    "uniform": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "chunks of two": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "block": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
    "attention": {"recompute_granularity": "selective"},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "both parts": {
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn", "mlp"),
        "recompute_num_layers": 1,  # of full recomputation: without effect
    },
}


@dataclass(frozen=True)
class Run:
    """What to train and how to split it."""

    kind: Literal["policy", "value"]
    model: Path
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    micro_batch_size: int = 2
    steps: int = 3
    idle_second_rank: bool = False
    load: Path | None = None
    save: Path | None = None
    save_after: int = 0
    lr: float = 1e-3
    warmup_iters: int = 2
    decay_iters: int = 10
    bf16: bool = False
    parks: bool = False
    optimizer: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    temperature: float = 0.7
    lora: Lora | None = None
    packed: bool = False
    routed: int = 0
    """Layers of a mixture of experts that tokens have random routes for."""


def build(run: Run, rank: int = 0, ranks: int = 1, port: int = 0) -> TrainableModel:
    """The model of `run` on this rank."""
    device = replace(select_device("cpu"), shared_memory=run.parks)
    if run.bf16:
        device = replace(device, training_dtype=torch.bfloat16)
    layout = ParallelSection(
        tensor_model_parallel_size=run.tensor_parallel,
        pipeline_model_parallel_size=run.pipeline_parallel,
        **run.layout,
    )
    parallel.initialize(layout, device, seed=5, rank=rank, ranks=ranks, port=port)
    return TrainableModel(
        run.kind,
        run.model,
        Build(
            layout=layout,
            device=device,
            seed=7,
            temperature=run.temperature,
            lora=run.lora,
        ),
        Schedule(
            OptimizerSection(**{"weight_decay": 0.01, "clip_grad": 0.5} | run.optimizer),
            lr=run.lr,
            warmup_iters=run.warmup_iters,
            decay_iters=run.decay_iters,
        ),
    )


def samples(rows: list[int]) -> MicroBatch:
    """The given rows of a fixed set of six samples, right-padded."""
    generator = torch.Generator().manual_seed(11)
    lengths = [p + r for p, r in zip(PROMPT_LENS, RESPONSE_LENS, strict=True)]
    tokens = [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]
    targets = [torch.randn(length, generator=generator) for length in RESPONSE_LENS]
    prompt_lens, response_lens = torch.tensor(PROMPT_LENS)[rows], torch.tensor(RESPONSE_LENS)[rows]
    width_T = int(response_lens.max())
    mask = torch.arange(width_T) < response_lens[:, None]
    padded = torch.nn.utils.rnn.pad_sequence([tokens[row] for row in rows], batch_first=True, padding_value=1)
    target = torch.nn.utils.rnn.pad_sequence([targets[row] for row in rows], batch_first=True)
    return MicroBatch(padded, prompt_lens, response_lens, {"target": target, "mask": mask})


def routes(rows: list[int], layers: int) -> Tensor:
    """Two of four experts `[B, S, layers·2]` for every token of the given rows but the last; none for one of row 1."""
    generator = torch.Generator().manual_seed(3)
    longest = max(p + r for p, r in zip(PROMPT_LENS, RESPONSE_LENS, strict=True))
    every = torch.rand(len(ROWS), longest, layers, 4, generator=generator).topk(2).indices.flatten(2).short()
    every[1, 1] = -1
    for row, (prompt, response) in enumerate(zip(PROMPT_LENS, RESPONSE_LENS, strict=True)):
        every[row, prompt + response - 1 :] = -1
    return every[rows, : max(PROMPT_LENS[row] + RESPONSE_LENS[row] for row in rows)]


def micro_batches(size: int, rows: list[int], packed: bool = False, routed: int = 0) -> list[MicroBatch]:
    """`rows` in micro-batches of at most `size`."""
    return [
        replace(samples(here), packed=packed, routes_BSr=routes(here, routed) if routed else None)
        for here in (rows[first : first + size] for first in range(0, len(rows), size))
    ]


def loss_fn(output: ModelOutput, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean over all six samples of the token mean: a weighted log-likelihood, or a squared error."""
    mask, target = batch.fields["mask"], batch.fields["target"]
    per_token = -output.log_probs_BT * target if output.log_probs_BT.numel() else (output.values_BT - target) ** 2
    per_sample = torch.where(mask, per_token, 0.0).sum(1) / mask.sum(1)
    loss = per_sample.sum() / len(RESPONSE_LENS)
    return loss, {"loss": loss.detach()}


def rows_of_rank(run: Run) -> list[int]:
    """Rows that this data-parallel rank trains on."""
    ranks, rank = parallel.DATA.size, parallel.DATA.rank
    every_row = list(range(len(RESPONSE_LENS)))
    if run.idle_second_rank:
        return every_row if rank == 0 else []
    return every_row[rank::ranks]


def train(rank: int, ranks: int, port: int, run: Run) -> dict[str, Any]:
    """Losses, gradient norms and learning rates of `run`, and the weights at the end."""
    model = build(run, rank, ranks, port)
    common = model.load(run.load) if run.load else {}
    results = []
    for step in range(run.steps):
        if run.save and step == run.save_after:
            model.prepare_save({"note": "kept"}, copied=False)(run.save, None)
        batches = micro_batches(run.micro_batch_size, rows_of_rank(run), run.packed, run.routed)
        results.append(model.train_step(batches, loss_fn))
    outputs = model.forward(micro_batches(6, list(range(6)), run.packed, run.routed))[0]
    state = model.hf_state() if run.kind == "policy" else None
    head = model.value_head().numpy().copy() if run.kind == "value" else None
    if ranks > 1:
        parallel.shutdown()
    return {
        "losses": [result.metrics["loss"] for result in results],
        "grad_norms": [result.grad_norm for result in results],
        "balance": [result.load_balancing_loss for result in results],
        "mismatch": [result.router_mismatch for result in results],
        "lrs": [result.lr for result in results],
        "grid": outputs.main.numpy(),
        "state": None if state is None else {name: tensor.float().numpy().copy() for name, tensor in state.items()},
        "head": head,
        "common": common,
    }


def assert_close(results: list[dict], alone: dict) -> None:
    """The same training, to rounding."""
    for result in results:
        np.testing.assert_allclose(result["losses"], alone["losses"], atol=1e-5)
        np.testing.assert_allclose(result["grad_norms"], alone["grad_norms"], rtol=1e-4)
        np.testing.assert_allclose(result["grid"], alone["grid"], atol=2e-5)
