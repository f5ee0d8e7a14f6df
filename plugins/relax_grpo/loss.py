"""GRPO: PPO-Clip; what differs is the advantage. Paper: Shao et al. 2024, arXiv:2402.03300."""

from __future__ import annotations

from relax_cli.algorithms.surrogate import ppo_clip
from relax_cli.algorithms.types import LossInputs, LossTerms


def policy_loss(inputs: LossInputs) -> LossTerms:
    """`max(−rA, −clip(r, 1−ε, 1+ε_hi)A)` per token `[B, T]`, `r = exp(logp − old_logp)`.

    Options: `ClipOptions`.
    """
    return ppo_clip(
        inputs.logp,
        inputs.old_logp,
        inputs.advantages,
        inputs.mask,
        eps_clip=inputs.options.eps_clip,
        eps_clip_high=inputs.options.clip_high,
        eps_clip_c=inputs.options.eps_clip_c,
    )
