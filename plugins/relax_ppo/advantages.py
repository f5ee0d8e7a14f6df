"""PPO's advantages: GAE over the reward on the last trainable token (in episodes, of each turn), less the KL penalty of
each token.

Values and policy may use different lambdas, and the policy's may grow with the response's length: VAPO, Yue et al.
2025, arXiv:2504.05118.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from relax_cli.algorithms.gae import gae, score_on_last_token
from relax_cli.algorithms.masking import select
from relax_cli.algorithms.types import AdvantageInputs, AdvantageOutputs


def advantages(inputs: AdvantageInputs) -> AdvantageOutputs:
    """`r_t = score·[t is the last trainable token] − kl_t`, then `gae`; options need `GaeOptions`.

    Returns use `critic_lambd`, advantages the length-adaptive lambda; each is `lambd` where unset. The value after the
    last token is `bootstrap`, or 0.
    """
    assert inputs.values is not None, "PPO needs the critic's values"
    if inputs.token_rewards is None:
        rewards_BT = score_on_last_token(inputs.rewards, inputs.mask)
    else:
        rewards_BT = select(inputs.token_rewards, inputs.mask)
    if inputs.kl is not None:
        rewards_BT = rewards_BT - inputs.kl
    options, alpha = inputs.options, inputs.options.length_adaptive_lambd_alpha
    policy_lambd = options.lambd if alpha is None else length_adaptive_lambda(inputs.mask, alpha)
    critic_lambd = options.lambd if options.critic_lambd is None else options.critic_lambd
    with_lambda = partial(gae, rewards_BT, inputs.values, inputs.mask, gamma=options.gamma, bootstrap=inputs.bootstrap)
    advantages_BT, returns_BT = with_lambda(lam=policy_lambd)
    if alpha is not None or critic_lambd != options.lambd:
        _, returns_BT = with_lambda(lam=critic_lambd)
    return AdvantageOutputs(advantages_BT, returns_BT)


def length_adaptive_lambda(mask_BT: Tensor, alpha: float) -> Tensor:
    """`1 − 1/(α·l)` of each response `[B]`, l its trainable tokens; at least 0. VAPO, arXiv:2504.05118."""
    length_B = mask_BT.sum(dim=1).clamp(min=1).double()
    return (1 - 1 / (alpha * length_B)).clamp(min=0.0)
