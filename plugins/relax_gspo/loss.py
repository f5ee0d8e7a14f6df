"""GSPO: one importance ratio for the whole response. Paper: Zheng et al. 2025, arXiv:2507.18071."""

from __future__ import annotations

import torch

from relax_cli.algorithms.masking import as_bool, select
from relax_cli.algorithms.surrogate import clip_surrogate
from relax_cli.algorithms.types import LossInputs, LossTerms


def policy_loss(inputs: LossInputs) -> LossTerms:
    """PPO-Clip per token `[B, T]` with `d = old_logp − logp` of every token replaced by its mean over the
    response's trainable tokens, the gradient flowing through the mean. Options: `ClipOptions`."""
    mask_BT = as_bool(inputs.mask)
    diff_BT = select(inputs.old_logp.detach(), mask_BT) - select(inputs.logp, mask_BT)
    mean_B1 = diff_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return clip_surrogate(
        torch.where(mask_BT, mean_B1, torch.zeros_like(mean_B1)),
        select(inputs.advantages.detach(), mask_BT),
        eps_clip=inputs.options.eps_clip,
        eps_clip_high=inputs.options.clip_high,
        eps_clip_c=inputs.options.eps_clip_c,
    )
