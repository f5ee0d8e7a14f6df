"""Records an estimator's two functions receive and return. No torch is imported here at run time.

Legend: `B` samples, `T` response tokens (padded). Masked slots may hold anything, NaN and inf included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AdvantageInputs:
    """What is known about a batch once it was generated and, where there is a critic, valued."""

    rewards: Tensor
    """Scalar reward of each sample `[B]`, float32; of an episode, the sum over its turns."""
    mask: Tensor
    """Trainable response tokens `[B, T]`, bool."""
    group_ids: Tensor
    """Prompt group of each sample `[B]`, int64."""
    options: Any
    """The estimator's option model (an instance of `Estimator.options`)."""
    values: Tensor | None = None
    """The critic's value of the state before each response token `[B, T]`; None without a critic."""
    kl: Tensor | None = None
    """Per-token KL already multiplied by its coefficient `[B, T]`, to be taken off the reward; None: off."""
    truncated: Tensor | None = None
    """True where the response hit the length limit `[B]`, bool."""
    bootstrap: Tensor | None = None
    """Value of the state after each response `[B]`, 0 where that is the end of the episode; None: 0 everywhere."""
    token_rewards: Tensor | None = None
    """Where the parts of `rewards` belong `[B, T]`, in multi-turn episodes; None: to the last trainable token."""


@dataclass(frozen=True)
class AdvantageOutputs:
    """Advantages, and returns where values exist. Masked slots are 0."""

    advantages: Tensor
    """`[B, T]`, float32."""
    returns: Tensor | None = None
    """`[B, T]`, float32."""


@dataclass(frozen=True)
class LossInputs:
    """What a policy loss may look at, for one micro-batch."""

    logp: Tensor
    """Log-probabilities under the model being trained `[B, T]`, with gradient."""
    old_logp: Tensor
    """Behaviour log-probabilities `[B, T]`."""
    advantages: Tensor
    """`[B, T]`."""
    mask: Tensor
    """Trainable response tokens `[B, T]`, bool."""
    rollout_logp: Tensor | None = None
    """The rollout engine's own log-probabilities `[B, T]`, where they differ from `old_logp`."""
    options: Any = None
    """The estimator's option model (an instance of `Estimator.options`)."""


@dataclass(frozen=True)
class LossTerms:
    """A loss and metrics, both per token: the trainer reduces them."""

    loss_per_token: Tensor
    """`[B, T]`, 0 in masked slots."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Metric name to `[B, T]`, 0 in masked slots."""
