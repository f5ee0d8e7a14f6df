"""SAPO: a soft gate in place of hard clipping. Paper: Gao et al. 2025, arXiv:2511.20347."""

from __future__ import annotations

import torch

from relax_cli.algorithms.masking import as_bool, select
from relax_cli.algorithms.surrogate import finite_ratio
from relax_cli.algorithms.types import LossInputs, LossTerms

# The gate's slope relative to its slope at ratio 1; below this a token counts as clipped.
_CLIPPED_BELOW = 0.9


def policy_loss(inputs: LossInputs) -> LossTerms:
    """`−(4/τ)·σ(τ(r−1))·A` per token `[B, T]`, `r = exp(logp − old_logp)`, `τ = τ_pos` where A > 0 and
    `τ_neg` elsewhere.

    The gradient at ratio 1 is the plain policy gradient's and fades as r leaves 1: its factor is `4p(1−p)`
    with `p = σ(τ(r−1))`. `clip_frac` is 1 where that is below 0.9. Options: `sapo_tau_pos`, `sapo_tau_neg`.
    """
    options = inputs.options
    mask_BT = as_bool(inputs.mask)
    advantages_BT = select(inputs.advantages.detach(), mask_BT)
    diff_BT = select(inputs.old_logp.detach(), mask_BT) - select(inputs.logp, mask_BT)
    tau_BT = torch.where(
        advantages_BT > 0,
        torch.full_like(advantages_BT, options.sapo_tau_pos),
        torch.full_like(advantages_BT, options.sapo_tau_neg),
    )
    ratio_BT = finite_ratio(-diff_BT)
    gate_BT = torch.sigmoid(tau_BT * (ratio_BT - 1))
    slope_BT = 4 * gate_BT.detach() * (1 - gate_BT.detach())
    metrics = {"clip_frac": (slope_BT < _CLIPPED_BELOW).to(diff_BT.dtype), "ppo_kl": diff_BT.detach()}
    return LossTerms(-(4 / tau_BT) * gate_BT * advantages_BT, metrics)
