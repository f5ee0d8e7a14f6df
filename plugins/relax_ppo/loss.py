"""PPO-Clip. Paper: Schulman et al. 2017, arXiv:1707.06347."""

from __future__ import annotations

from relax_cli.algorithms.surrogate import ppo_clip
from relax_cli.algorithms.types import LossInputs, LossTerms


def policy_loss(inputs: LossInputs) -> LossTerms:
    """`max(−rA, −clip(r, 1−ε, 1+ε_hi)A)` per token `[B, T]`, `r = exp(logp − old_logp)`; for A < 0 at most
    `−cA` where a dual-clip constant is set. Options: `ClipOptions`."""
    return ppo_clip(
        inputs.logp,
        inputs.old_logp,
        inputs.advantages,
        inputs.mask,
        eps_clip=inputs.options.eps_clip,
        eps_clip_high=inputs.options.clip_high,
        eps_clip_c=inputs.options.eps_clip_c,
    )
