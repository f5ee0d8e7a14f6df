"""What a reward function receives and returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_cli.data.rows import Label
from relax_cli.data.values import Unusable, label_value, shown
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
    label: Label
    """The row's label as text, or the list or object that it is; None without `--label-key`."""
    metadata: dict[str, Any]
    """The row's metadata: a copy, which may be changed."""
    truncated: bool
    """True where the response hit the length limit."""
    group: int
    """Prompt group; samples of one prompt share it."""
    reward: str | None = None
    """The reward that the row names, None where `--rm-type` judges."""

    def describe(self) -> str:
        """The sample in one line, for error messages."""
        return f"group {self.group}, prompt {self.prompt[-80:]!r}, response {self.response[:80]!r}"

    def required_label(self, reward: str) -> str:
        """For rewards of plugins: the label. Raises RunError: there is none, or not a text, but one is needed."""
        if isinstance(self.label, str):
            return self.label
        what = "a label" if self.label is None else "a text as its label"
        raise self.no_label(f"the reward {reward} needs {what}", "a text for every prompt")

    def answers(self, reward: str) -> list[str]:
        """What the reward accepts: the label, or each item of a label that is a list.
        Raises RunError: there is none, but the reward needs one."""
        try:
            if found := answers_of(self.label):
                return found
        except Unusable as error:
            what, expected = f"the label for the reward {reward} {error}", "a text, a number or a list of them"
            raise self.no_label(what, expected) from error
        raise self.no_label(f"the reward {reward} needs a label", "a label for every prompt")

    def no_label(self, message: str, expected: str) -> RunError:
        """The error that the label is not what the reward needs."""
        got = "no label" if self.label is None else shown(self.label)
        return RunError(NEEDS_LABEL(message, where=self.describe(), got=got, expected=expected, fix="--label-key KEY"))


def answers_of(label: Label) -> list[str]:
    """The answers that a label accepts: itself, or each item of a list; none of no label.
    Raises Unusable: it is an object, or has an item without a text."""
    if isinstance(label, dict):
        raise Unusable("is an object")
    found = [label_value(item) for item in (label if isinstance(label, list) else [label]) if label is not None]
    if not all(isinstance(item, str) for item in found):
        raise Unusable("has an item that is not a text or a number")
    return [str(item) for item in found]


@dataclass(frozen=True)
class RewardResult:
    """A judgement: the number that trains, and what it is made of."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    failed: bool = False
    """Whether the reward failed on this sample, which `--reward-on-error` allows."""


Score = float | Mapping[str, float] | RewardResult
"""What a reward may return for one sample: a number, or named numbers of which `reward` or `--reward-key` trains."""

BatchReward = Callable[[Sequence[RewardInput]], Sequence[Score]]
"""A reward judges a whole batch at once and returns one score for each sample, in order."""


class JudgesAhead(ABC):
    """A reward that can judge the samples of a batch before all of them exist, without taking time of this process."""

    @abstractmethod
    def ahead(self, sample: RewardInput, group: Sequence[RewardInput]) -> None:
        """Begin to judge a sample that a later call has in its batch.
        `group` is all samples of its prompt, where this is the last of them; else none."""
