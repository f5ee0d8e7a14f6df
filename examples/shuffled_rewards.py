"""A control: exact-match rewards dealt to the wrong samples. A run that still improves learns from something else.

    relax quickstart DIR --prepare-only
    relax train --recipe DIR/recipe.yaml --set reward.rm_type=null --custom-rm-path examples/shuffled_rewards.py:reward

Held-out samples are also shuffled, which leaves their mean unchanged.
"""

import random

from relax_cli.data.rewards import RewardInput


def reward(samples: list[RewardInput]) -> list[float]:
    """1 for a right answer and 0 for a wrong one, in random order."""
    rewards = [float(sample.response.strip() == sample.label) for sample in samples]
    random.Random("".join(sample.response for sample in samples)).shuffle(rewards)
    return rewards
