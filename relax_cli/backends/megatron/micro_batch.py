"""What goes into the trainer and what comes out.

Legend: `B` samples, `S` prompt + response (padded), `T` response tokens (padded).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from relax_cli.backends.device import Device
from relax_cli.config.schema import ParallelSection
from relax_cli.models.lora import Lora

ModelKind: TypeAlias = Literal["policy", "value"]


@dataclass(frozen=True)
class Build:
    """How to build a model, whichever its folder."""

    layout: ParallelSection
    """How it is split, built and recomputed; `--resource` is not looked at."""
    device: Device
    """Where it lives, the type it is trained in, and whether sleeping takes it away from there."""
    seed: int
    """Initialises the value head, and adapters."""
    temperature: float = 1.0
    """Logits are divided by it, as the rollout engine's are."""
    value_head_std: float = 0.02
    """Standard deviation of the value head's initial weights; 0 starts with values of 0."""
    lora: Lora | None = None
    """Adapters to train in place of the weights."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward and backward pass, right-padded."""

    tokens_BS: Tensor
    """Prompt and response ids, int64; anything in the padding."""
    prompt_lens_B: Tensor
    """At least 1."""
    response_lens_B: Tensor
    fields: dict[str, Tensor] = field(default_factory=dict)
    """What the loss needs, `[B, T]` (T the longest response here) or `[B]`."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same samples on `device`."""
        return MicroBatch(
            self.tokens_BS.to(device),
            self.prompt_lens_B.to(device),
            self.response_lens_B.to(device),
            {name: value.to(device) for name, value in self.fields.items()},
        )


@dataclass(frozen=True)
class ResponseIndex:
    """Where the states that predict response tokens are, in reading order; `N` response tokens of a micro-batch."""

    states_N: Tensor
    """Positions in hidden states flattened from `[S, B, H]`."""
    tokens_N: Tensor
    """The response tokens themselves."""
    cells_N: Tensor
    """Positions in a flattened `[B, T]` grid."""
    shape: tuple[int, int]
    """(B, T)."""

    @classmethod
    def of(cls, batch: MicroBatch) -> ResponseIndex:
        """Response token t of sample b is predicted by the state at `prompt_len + t − 1`."""
        rows = batch.tokens_BS.size(0)
        width = int(batch.response_lens_B.max())
        mask_BT = torch.arange(width, device=batch.tokens_BS.device) < batch.response_lens_B[:, None]
        sample_N, step_N = mask_BT.nonzero(as_tuple=True)
        token_position_N = batch.prompt_lens_B[sample_N] + step_N
        return cls(
            states_N=(token_position_N - 1) * rows + sample_N,
            tokens_N=batch.tokens_BS[sample_N, token_position_N],
            cells_N=sample_N * width + step_N,
            shape=(rows, width),
        )

    def to_grid(self, values_N: Tensor) -> Tensor:
        """Spread values over `[B, T]`, 0 beyond each response."""
        grid = values_N.new_zeros(self.shape[0] * self.shape[1])
        return grid.index_copy(0, self.cells_N, values_N).view(self.shape)


@dataclass(frozen=True)
class ModelOutput:
    """What a model says about the response tokens of a micro-batch, each `[B, T]` fp32, 0 beyond the response."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None

    @property
    def log_probs_BT(self) -> Tensor:
        """Policy: log-probability of each response token at the model's temperature."""
        assert self.log_probs is not None, "a value model has no log-probabilities"
        return self.log_probs

    @property
    def entropy_BT(self) -> Tensor:
        """Policy: entropy of the distribution each response token was drawn from; gradient only on request."""
        assert self.entropy is not None, "a value model has no entropy"
        return self.entropy

    @property
    def values_BT(self) -> Tensor:
        """Value model: value of the state before each response token."""
        assert self.values is not None, "a policy has no values"
        return self.values

    @property
    def main(self) -> Tensor:
        """The differentiable grid of either kind."""
        return self.values_BT if self.log_probs is None else self.log_probs


@dataclass(frozen=True)
class TrainStep:
    """One optimizer step."""

    metrics: dict[str, float]
    """What the loss function reported, summed over micro-batches and data-parallel ranks."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """Learning rate of this step."""
    skipped: bool
    """The gradient was not finite, so nothing was updated."""
    load_balancing_loss: float | None = None
    """Of a mixture of experts with `--moe-aux-loss-coeff`: 1 where all experts get equally many tokens."""
