"""CISPO: clip the importance weight instead of the objective. Paper: MiniMax 2025, arXiv:2506.13585."""

from __future__ import annotations

import torch

from relax_cli.algorithms.masking import as_bool, select
from relax_cli.algorithms.surrogate import finite_ratio
from relax_cli.algorithms.types import LossInputs, LossTerms


def policy_loss(inputs: LossInputs) -> LossTerms:
    """`−sg(clip(r, 1−ε, 1+ε_hi))·sg(A)·logp` per token `[B, T]`, so that every token keeps a gradient.

    `r = exp(logp − old_logp)`; with ε ≥ 1 the weight has no lower bound. With `cispo_by_sign` it is `min(r, 1+ε_hi)`
    where A ≥ 0 and `max(r, 1−ε)` where A < 0. Options: `CispoOptions`.
    """
    options = inputs.options
    mask_BT = as_bool(inputs.mask)
    logp_BT = select(inputs.logp, mask_BT)
    advantages_BT = select(inputs.advantages.detach(), mask_BT)
    diff_BT = select(inputs.old_logp, mask_BT).detach() - logp_BT.detach()
    ratio_BT = finite_ratio(-diff_BT, advantages_BT * logp_BT.detach())
    low, high = 1 - options.eps_clip, 1 + options.clip_high
    if options.cispo_by_sign and not options.cispo_two_sided:
        weight_BT = torch.where(advantages_BT >= 0, ratio_BT.clamp(max=high), ratio_BT.clamp(min=low))
    else:
        weight_BT = ratio_BT.clamp(low, high)
    metrics = {"clip_frac": (weight_BT != ratio_BT).to(logp_BT.dtype), "ppo_kl": diff_BT}
    return LossTerms(-weight_BT * advantages_BT * logp_BT, metrics)
