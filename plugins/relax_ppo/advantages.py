"""PPO's advantages: GAE over the reward on the last trainable token, less the KL penalty of each token."""

from __future__ import annotations

from relax_cli.algorithms.gae import gae, score_on_last_token
from relax_cli.algorithms.types import AdvantageInputs, AdvantageOutputs


def advantages(inputs: AdvantageInputs) -> AdvantageOutputs:
    """`r_t = score·[t is the last trainable token] − kl_t`, then `gae`; options need `GaeOptions`.

    A value after the last token is taken as 0, also for truncated samples.
    """
    assert inputs.values is not None, "PPO needs the critic's values"
    rewards_BT = score_on_last_token(inputs.rewards, inputs.mask)
    if inputs.kl is not None:
        rewards_BT = rewards_BT - inputs.kl
    advantages_BT, returns_BT = gae(
        rewards_BT, inputs.values, inputs.mask, gamma=inputs.options.gamma, lam=inputs.options.lambd
    )
    return AdvantageOutputs(advantages_BT, returns_BT)
