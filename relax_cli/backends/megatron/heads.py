"""What the last states become: log-probabilities and entropy from logits split over ranks by vocabulary, or values.

Legend: `N` tokens, `V` the vocabulary slice of this rank, `H` hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from relax_cli.backends.megatron import parallel

NEVER = -1e30
"""Logit of a token that does not exist: finite, so that probability times logit is 0."""
ROWS_BYTES = 64 << 20
"""Memory of the rows of fp32 logits that are reduced at a time."""


def token_statistics(
    logits_NV: Tensor, tokens_N: Tensor, vocab_size: int, temperature: float, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of tokens at a sampling temperature, fp32 `[N]`; changes fp32 logits in place.
    Rows after the `vocab_size` of all ranks only make their slices equally long."""
    logits_NV = logits_NV.float()
    tokens_here = vocab_size - parallel.TENSOR.rank * logits_NV.size(1)
    if tokens_here < logits_NV.size(1):
        filler_V = torch.arange(logits_NV.size(1), device=logits_NV.device) >= tokens_here
        logits_NV = logits_NV.masked_fill(filler_V, NEVER)
    if temperature != 1.0:
        logits_NV = logits_NV.div_(temperature)
    return log_probs_and_entropy(logits_NV, tokens_N, entropy_grad=entropy_grad)


def in_chunks(
    statistics: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    states_NH: Tensor,
    tokens_N: Tensor,
    *,
    chunk: int,
    ranks: int,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies from the logits of at most `chunk` tokens at a time, backward as well.

    Args:
        statistics: of a part of the states and its tokens; called again in the backward pass.
        states_NH: this rank's share of them, where sequence parallelism shares them out evenly among `ranks`.
        tokens_N: all response tokens; states after them are padding.
    """
    here = states_NH.size(0)
    tokens_RN = torch.nn.functional.pad(tokens_N, (0, ranks * here - tokens_N.numel())).view(ranks, here)
    size = max(1, chunk // ranks)
    # A part that is gathered from all ranks has its tokens rank by rank.
    parts = [
        checkpoint(statistics, states, tokens.flatten(), use_reentrant=False, preserve_rng_state=False)
        for states, tokens in zip(torch.split(states_NH, size), torch.split(tokens_RN, size, dim=1), strict=True)
    ]
    log_probs_N, entropy_N = (
        torch.cat([part.view(ranks, -1) for part in column], dim=1).flatten()[: tokens_N.numel()]
        for column in zip(*parts, strict=True)
    )
    return log_probs_N, entropy_N


class ValueHead(torch.nn.Linear):
    """States to values in fp32; called like Megatron's output layer, whose place it takes.

    Under tensor parallelism every rank has the whole head and sees the same states, so its gradients agree without
    communication, and so do those it hands down.
    """

    def __init__(self, hidden_size: int, std: float, seed: int) -> None:
        super().__init__(hidden_size, 1, dtype=torch.float32)
        with torch.no_grad():
            self.weight.normal_(0.0, std, generator=torch.Generator().manual_seed(seed))
            self.bias.zero_()

    def forward(self, input_: Tensor, weight: None = None, **_: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        """`[.., H]` to `[.., 1]`."""
        assert weight is None, "a value head shares no weights with the embedding"
        return super().forward(input_.float()), None


def log_probs_and_entropy(logits_NV: Tensor, tokens_N: Tensor, *, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    """Log-probability of each token (ids in the whole vocabulary) and entropy of its distribution, fp32 `[N]`, in nats,
    from fp32 logits already divided by the temperature.

    Args:
        entropy_grad: let gradients also flow through the entropy; it costs memory of the size of the logits.
    """
    if parallel.TENSOR.size == 1:
        all_NV = logits_NV.log_softmax(-1)
        log_probs_N = all_NV.gather(-1, tokens_N[:, None]).squeeze(-1)
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            return log_probs_N, -_by_rows(lambda rows_NV: torch.linalg.vecdot(rows_NV.exp(), rows_NV), all_NV)
    return _vocab_parallel(logits_NV, tokens_N, entropy_grad)


def _vocab_parallel(logits_NV: Tensor, tokens_N: Tensor, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    largest_N = logits_NV.detach().amax(-1)
    dist.all_reduce(largest_N, op=dist.ReduceOp.MAX, group=parallel.TENSOR.group)
    shifted_NV = logits_NV - largest_N[:, None]
    weights_NV = shifted_NV.exp()
    total_N = _sum_over_ranks(weights_NV.sum(-1))
    log_total_N = total_N.log()
    local_N = tokens_N - parallel.TENSOR.rank * logits_NV.size(-1)
    mine_N = (local_N >= 0) & (local_N < logits_NV.size(-1))
    picked_N = shifted_NV.gather(-1, torch.where(mine_N, local_N, 0)[:, None]).squeeze(-1)
    log_probs_N = _sum_over_ranks(torch.where(mine_N, picked_N, 0.0)) - log_total_N
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        # A function of sums over ranks: `-Σ p log p` of a slice would send the total only that slice's gradient.
        expected_N = _by_rows(torch.linalg.vecdot, weights_NV, shifted_NV)
        return log_probs_N, log_total_N - _sum_over_ranks(expected_N) / total_N


def _by_rows(reduce: Callable[..., Tensor], *all_NV: Tensor) -> Tensor:
    """`reduce` of some rows at a time: between them and `[N]` is as much memory as they take."""
    rows = max(1, ROWS_BYTES // (4 * all_NV[0].size(-1)))
    parts = zip(*(torch.split(x_NV, rows) for x_NV in all_NV), strict=True)
    return torch.cat([reduce(*part) for part in parts])


def _sum_over_ranks(x: Tensor) -> Tensor:
    """Sum forward; the gradient reaches every rank unchanged."""
    return reduce_from_tensor_model_parallel_region(x.contiguous())  # type: ignore[no-any-return]
