"""What a reward function receives and returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from relax_cli.errors import RunError, problem_kind

REWARD = "reward"
"""The part that trains, where a reward returns several and no `--reward-key` picks another."""
NEEDS_LABEL = problem_kind(
    "reward-needs-label",
    "Reward",
    "The reward compares with a label, so `--label-key` has to name one.",
    option="--label-key",
)


@dataclass(frozen=True)
class RewardInput:
    """One response to judge."""

    prompt: str
    """The prompt as text; chat messages arrive rendered by the chat template."""
    response: str
    """Decoded response without special tokens, and without the stop string that ended it."""
    label: str | None
    """The row's label, None without `--label-key`."""
    metadata: dict[str, Any]
    """The row's metadata: a copy, which may be changed."""
    truncated: bool
    """True where the response hit the length limit."""
    group: int
    """Prompt group; samples of one prompt share it."""

    def describe(self) -> str:
        """The sample in one line, for error messages."""
        return f"group {self.group}, prompt {self.prompt[-80:]!r}, response {self.response[:80]!r}"

    def required_label(self, reward: str) -> str:
        """The label.

        Raises:
            RunError: there is none, but the reward needs one.
        """
        if self.label is None:
            raise RunError(
                NEEDS_LABEL(
                    f"the reward {reward} needs a label",
                    where=self.describe(),
                    got="no label",
                    expected="a label for every prompt",
                    fix="--label-key KEY",
                )
            )
        return self.label


@dataclass(frozen=True)
class RewardResult:
    """A judgement: the number that trains, and what it is made of."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)


Score = float | Mapping[str, float] | RewardResult
"""What a reward may return for one sample: a number, or named numbers of which `reward` or `--reward-key` trains."""

BatchReward = Callable[[Sequence[RewardInput]], Sequence[Score]]
"""A reward judges a whole batch at once and returns one score for each sample, in order."""


class RewardFunction(Protocol):
    """A loaded reward."""

    def __call__(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        """Judge a batch.

        Raises:
            RunError: the function failed, or returned something other than one finite number for each sample.
        """

    def close(self) -> None:
        """End the worker processes, if there are any."""
