"""Clipped policy surrogates and importance weights, per token.

Paper: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347; dual clip: Ye et al.
    2020, arXiv:1912.09729. Legend: `B` samples, `T` response tokens (padded). The mask selects inputs, so
    masked slots may hold NaN or inf; everything is at least float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relax_cli.algorithms.masking import as_bool, select
from relax_cli.algorithms.types import LossTerms

LARGEST_LOG_RATIO = 80.0
"""`exp` of it is 5e34; that of 89 overflows float32."""


def finite_ratio(log_ratio: Tensor, scale: Tensor | None = None) -> Tensor:
    """`exp(log_ratio)`, capped where it, or its product with `scale`, would pass `exp(LARGEST_LOG_RATIO)`.

    Beyond the cap the gradient is 0: that of an infinite ratio would be NaN wherever clipping stops it.
    """
    if scale is None:
        return torch.exp(log_ratio.clamp(max=LARGEST_LOG_RATIO))
    return torch.exp(torch.minimum(log_ratio, LARGEST_LOG_RATIO - scale.abs().clamp(min=1.0).log()))


def ppo_clip(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> LossTerms:
    """PPO-Clip: `max(−rA, −clip(r, 1−ε, 1+ε_hi)A)` with `r = exp(logp − old_logp)`.

    All tensors are `[B, T]`: log-probabilities of the model being trained, with gradient, those of the behaviour,
    advantages, and a mask that is bool or numeric.

    Args:
        eps_clip: clip range below 1.
        eps_clip_high: clip range above 1; follows `eps_clip` when None.
        eps_clip_c: dual clip, > 1: where A < 0 the loss is at most `−cA`. None: off.

    Returns the loss `[B, T]`, not reduced; metrics `clip_frac` and `ppo_kl` (`old_logp − logp`).
    """
    mask_BT = as_bool(mask)
    diff_BT = select(old_logp.detach(), mask_BT) - select(logp, mask_BT)
    return clip_surrogate(
        diff_BT,
        select(advantages.detach(), mask_BT),
        eps_clip=eps_clip,
        eps_clip_high=eps_clip if eps_clip_high is None else eps_clip_high,
        eps_clip_c=eps_clip_c,
    )


def clip_surrogate(
    diff_BT: Tensor, advantages_BT: Tensor, *, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None
) -> LossTerms:
    """`ppo_clip` from `d = old − logp`; both tensors are 0 in masked slots already, and so the loss is."""
    ratio_BT = finite_ratio(-diff_BT, advantages_BT)
    plain_BT = -ratio_BT * advantages_BT
    clipped_BT = -ratio_BT.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages_BT
    loss_BT = torch.maximum(plain_BT, clipped_BT)
    if eps_clip_c is not None:
        loss_BT = torch.where(advantages_BT < 0, torch.minimum(loss_BT, -eps_clip_c * advantages_BT), loss_BT)
    metrics = {"clip_frac": (clipped_BT > plain_BT).to(diff_BT.dtype), "ppo_kl": diff_BT.detach()}
    return LossTerms(loss_BT, metrics)


@torch.no_grad()
def tis_weight(train_logp: Tensor, rollout_logp: Tensor, *, low: float, high: float) -> Tensor:
    """Truncated importance weight `clamp(exp(train_logp − rollout_logp), low, high)`, detached: `[B, T]`, float32.

    It corrects for a rollout engine whose log-probabilities `[B, T]` of the sampled tokens differ from the trainer's
    before the update; multiply the loss per token by it. A masked slot may give NaN here: select the product, do not
    multiply it by the mask.
    """
    return torch.exp(train_logp.float() - rollout_logp.float()).clamp(low, high)
