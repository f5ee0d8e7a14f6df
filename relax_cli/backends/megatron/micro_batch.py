"""What goes into the trainer and what comes out.

Legend: `B` samples, `S` prompt + response (padded), `T` response tokens (padded).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

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
    """Samples of one forward and backward pass, here right-padded."""

    tokens_BS: Tensor
    """Prompt and response ids, int64; anything in the padding."""
    prompt_lens_B: Tensor
    """At least 1."""
    response_lens_B: Tensor
    fields: dict[str, Tensor] = field(default_factory=dict)
    """What the loss needs, `[B, T]` (T the longest response here) or `[B]`."""
    packed: bool = False
    """The layers get the samples as one row without padding, the longest first."""
    routes_BSr: Tensor | None = None
    """With `--router-replay`: the experts `[B, S, layers·k]` of each token; negative where the router chooses."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same samples on `device`."""
        moved: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved, fields={name: x.to(device) for name, x in self.fields.items()})

    def laid_out(self, pieces: int = 1) -> tuple[Tensor, ResponseIndex]:
        """The tokens that go through the layers, `[B, S]` or packed `[1, ΣS]` with lengths that are multiples of
        `pieces`, and where they predict responses."""
        rows, device = self.tokens_BS.size(0), self.tokens_BS.device
        # The last token of a sample predicts nothing that was generated.
        lengths_B = (self.prompt_lens_B + self.response_lens_B - 1).clamp(min=1)
        if not self.packed:
            longest = int(lengths_B.max())
            routes = None if self.routes_BSr is None else self.routes_BSr[:, :longest]
            return self.tokens_BS[:, :longest], self._index(torch.arange(rows, device=device), rows, routes=routes)
        lengths_B += -lengths_B % pieces
        longest = int(lengths_B.max())
        order_B = lengths_B.argsort(descending=True, stable=True)
        lengths_B = lengths_B[order_B]
        real_BS = torch.arange(longest, device=device) < lengths_B[:, None]
        tokens_BS = pad(self.tokens_BS, (0, max(0, longest - self.tokens_BS.size(1))))
        routes = self.routes_BSr
        if routes is not None:
            routes = pad(routes, (0, 0, 0, max(0, longest - routes.size(1))), value=-1)
            routes = routes[order_B, :longest][real_BS][None]
        first_B = (lengths_B.cumsum(0) - lengths_B)[order_B.argsort()]
        index = self._index(first_B, 1, lengths=tuple(lengths_B.tolist()), routes=routes)
        return tokens_BS[order_B, :longest][real_BS][None], index

    def _index(self, first_B: Tensor, stride: int, **more: Any) -> ResponseIndex:
        """Response token t of a sample is predicted by its state `prompt_len + t − 1`. Its states begin at `first_B`,
        and are `stride` positions apart."""
        width = int(self.response_lens_B.max())
        mask_BT = torch.arange(width, device=first_B.device) < self.response_lens_B[:, None]
        sample_N, step_N = mask_BT.nonzero(as_tuple=True)
        token_position_N = self.prompt_lens_B[sample_N] + step_N
        return ResponseIndex(
            states_N=first_B[sample_N] + (token_position_N - 1) * stride,
            tokens_N=self.tokens_BS[sample_N, token_position_N],
            cells_N=sample_N * width + step_N,
            shape=(self.tokens_BS.size(0), width),
            **more,
        )


@dataclass(frozen=True)
class ResponseIndex:
    """Where the states that predict response tokens are, in reading order; `N` response tokens of a micro-batch."""

    states_N: Tensor
    """Positions in hidden states flattened from `[S, B, H]`, where B is 1 for packed samples."""
    tokens_N: Tensor
    """The response tokens themselves."""
    cells_N: Tensor
    """Positions in a flattened `[B, T]` grid."""
    shape: tuple[int, int]
    """(B, T)."""
    lengths: tuple[int, ...] | None = None
    """Of packed samples: how many tokens each has, in the order they lie in their row."""
    routes: Tensor | None = None
    """`routes_BSr` of the micro-batch, for the tokens that go through the layers."""

    def within(self, places: Tensor, row: int) -> ResponseIndex:
        """What of it is at `places`, ascending, of the `row` ones along the first dimension of `[S, B, H]`."""
        routes = self.routes
        if routes is not None:
            routes = pad(routes, (0, 0, 0, row - routes.size(1)), value=-1)[:, places]
        new_S = self.states_N.new_full((row,), -1)
        new_S[places] = torch.arange(places.numel(), device=places.device)
        stride = self.shape[0] if self.lengths is None else 1
        place_N = new_S[self.states_N // stride]
        here_N = place_N >= 0
        states_N = (place_N * stride + self.states_N % stride)[here_N]
        tokens_N, cells_N = self.tokens_N[here_N], self.cells_N[here_N]
        return replace(self, states_N=states_N, tokens_N=tokens_N, cells_N=cells_N, routes=routes)

    def to_grid(self, values_N: Tensor) -> Tensor:
        """Spread values over `[B, T]`, 0 beyond each response."""
        grid = values_N.new_zeros(self.shape[0] * self.shape[1])
        return grid.index_copy(0, self.cells_N, values_N).view(self.shape)


NOTHING = torch.empty(0)


@dataclass(frozen=True)
class ModelOutput:
    """What a model says about the response tokens of a micro-batch, each `[B, T]` fp32, 0 beyond the response."""

    log_probs_BT: Tensor = NOTHING
    """Policy: log-probability of each response token at the model's temperature."""
    entropy_BT: Tensor = NOTHING
    """Policy: entropy of the distribution each response token was drawn from; gradient only on request."""
    values_BT: Tensor = NOTHING
    """Value model: value of the state before each response token."""

    @property
    def main(self) -> Tensor:
        """The differentiable grid of either kind."""
        return self.values_BT if self.log_probs_BT is NOTHING else self.log_probs_BT


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
    router_mismatch: float | None = None
    """With `--router-replay`: part of the routes, over tokens and layers, that the model would not have chosen."""
