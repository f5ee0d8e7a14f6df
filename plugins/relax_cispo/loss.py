"""CISPO: clip the importance weight instead of the objective. Paper: MiniMax 2025, arXiv:2506.13585."""

from __future__ import annotations

import torch

from relax_cli.algorithms.masking import as_bool, select
from relax_cli.algorithms.types import LossInputs, LossTerms


def policy_loss(inputs: LossInputs) -> LossTerms:
    """`−sg(coef)·sg(A)·logp` per token `[B, T]`, so that every token keeps a gradient.

    `coef = min(r, 1+ε_hi)` for A ≥ 0 and `max(r, 1−ε)` for A < 0, `r = exp(logp − old_logp)`; with
    `cispo_two_sided` it is `clip(r, 1−ε, 1+ε_hi)` for every token, as in the paper. Options: `ClipOptions`.
    """
    options = inputs.options
    mask_BT = as_bool(inputs.mask)
    logp_BT = select(inputs.logp, mask_BT)
    advantages_BT = select(inputs.advantages.detach(), mask_BT)
    diff_BT = select(inputs.old_logp, mask_BT).detach() - logp_BT.detach()
    ratio_BT = torch.exp(-diff_BT)
    low, high = 1 - options.eps_clip, 1 + options.clip_high
    if options.cispo_two_sided:
        coef_BT = ratio_BT.clamp(low, high)
    else:
        coef_BT = torch.where(advantages_BT >= 0, ratio_BT.clamp(max=high), ratio_BT.clamp(min=low))
    metrics = {"clip_frac": (coef_BT != ratio_BT).to(logp_BT.dtype), "ppo_kl": diff_BT}
    return LossTerms(-coef_BT * advantages_BT * logp_BT, metrics)
