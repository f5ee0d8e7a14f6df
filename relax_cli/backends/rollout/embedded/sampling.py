"""Drawing one token per row from logits, reproducibly.

Legend: `B` rows, `T` new tokens, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from relax_cli.backends.rollout.protocol import SamplingParams


def draw_uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """Uniforms in [0, 1) `[B, count]`, float64; row i depends on `seeds[i]` alone.

    A longer draw from the same seed starts with the shorter one: the length limit does not change a response.
    """
    uniforms_BT = torch.empty(len(seeds), count, dtype=torch.float64)
    generator = torch.Generator()
    for row, seed in zip(uniforms_BT, seeds, strict=True):
        row.uniform_(generator=generator.manual_seed(seed))
    return uniforms_BT


def sample(logits_BV: Tensor, uniforms_B: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    top-k, then top-p, truncate and renormalise what is drawn from. The log-probability reported is that of
    the whole softmax at the temperature, which is what a trainer's teacher-forced pass computes.

    Args:
        logits_BV: `[B, V]`, float32.
        uniforms_B: `[B]` in [0, 1), float64.

    Returns:
        tokens `[B]` int64 and log-probabilities `[B]` float32.
    """
    if sampling.temperature != 1.0:
        logits_BV = logits_BV / sampling.temperature
    logp_BV = torch.log_softmax(logits_BV, dim=-1)
    keeps_all_k = sampling.top_k <= 0 or sampling.top_k >= logits_BV.shape[-1]
    if keeps_all_k and sampling.top_p == 1.0:
        tokens_B1 = _invert(logp_BV.exp(), uniforms_B)
    else:
        tokens_B1 = _sample_truncated(logp_BV, uniforms_B, -1 if keeps_all_k else sampling.top_k, sampling.top_p)
    return tokens_B1.squeeze(-1), logp_BV.gather(-1, tokens_B1).squeeze(-1)


def _sample_truncated(logp_BV: Tensor, uniforms_B: Tensor, top_k: int, top_p: float) -> Tensor:
    if top_k > 0:
        sorted_logp_BK, ids_BK = logp_BV.topk(top_k, dim=-1)
    else:
        sorted_logp_BK, ids_BK = logp_BV.sort(dim=-1, descending=True, stable=True)
    # float64: a float32 sum over a large vocabulary is off by more than the mass of a rare token.
    probs_BK = sorted_logp_BK.double().exp()
    if top_p < 1.0:
        mass_before_BK = probs_BK.cumsum(-1) - probs_BK
        limit_B1 = top_p * probs_BK.sum(-1, keepdim=True)
        # The likeliest token has no mass before it, so at least one stays.
        probs_BK = probs_BK.masked_fill(mass_before_BK >= limit_B1, 0.0)
    return ids_BK.gather(-1, _invert(probs_BK, uniforms_B))


def _invert(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """First index `[B, 1]` whose cumulative (unnormalised) probability exceeds `u * total`."""
    cumulative_BV = probs_BV.cumsum(-1, dtype=torch.float64)
    # No draw beyond the end: uniforms are at most 1 - 2**-53, so u * total rounds to less than total. A token
    # of probability 0 does not raise the sum, so it is never the first to exceed anything.
    target_B1 = (uniforms_B * cumulative_BV[:, -1]).unsqueeze(-1)
    return torch.searchsorted(cumulative_BV, target_B1, right=True)
