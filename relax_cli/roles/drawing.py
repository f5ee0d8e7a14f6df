"""What a rollout worker has sampled for a rollout that chooses its groups, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from relax_cli.roles.judging import Judged
from relax_cli.roles.spread import Spread


@dataclass(frozen=True)
class DrawnGroup:
    """The samples of one prompt."""

    place: int
    """Of the prompt among those that the rollout has drawn."""
    has_signal: bool
    tokens: int
    """Of all responses."""
    reward: float
    """Mean of its samples whose reward did not fail; 0 where all did."""


def has_signal(group: Sequence[Judged]) -> bool:
    """Whether the rewards of a prompt's samples that train differ: else every advantage within the group is 0."""
    return len({j.result.reward for j in group if j.trains}) > 1


def drawn_group(group: Sequence[Judged], place: int) -> DrawnGroup:
    """What is reported of a group."""
    return DrawnGroup(
        place=place,
        has_signal=has_signal(group),
        tokens=sum(len(j.generation.tokens) for j in group),
        reward=Spread.of(j.result.reward for j in group if not j.result.failed).mean,
    )


def renumbered(samples: Sequence[Judged], chosen: Sequence[int], samples_per_prompt: int) -> list[Judged]:
    """The samples of the chosen places, numbered as they stand in the batch."""
    numbers = {place: number for number, place in enumerate(chosen)}
    return [
        replace(j, group=numbers[j.group], row=numbers[j.group] * samples_per_prompt + j.row % samples_per_prompt)
        for j in samples
        if j.group in numbers
    ]


class Drawn:
    """The samples of one rollout by round; the samples of a prompt are next to each other."""

    def __init__(self, samples_per_prompt: int) -> None:
        self._size = samples_per_prompt
        self._rollout_id = -1
        self._rounds: dict[int, list[Judged]] = {}

    def groups(self, rollout_id: int, offset: int, sample: Callable[[], list[Judged]]) -> list[DrawnGroup]:
        """The groups of the round that begins at place `offset`, sampled unless that was done before."""
        if rollout_id != self._rollout_id:
            self._rollout_id, self._rounds = rollout_id, {}
        if offset not in self._rounds:
            self._rounds[offset] = sample()
        judged, size = self._rounds[offset], self._size
        groups = (judged[i : i + size] for i in range(0, len(judged), size))
        return [drawn_group(group, group[0].group) for group in groups]

    def leave(self) -> list[Judged]:
        """Everything drawn, in the order of the data; nothing of it is kept."""
        rounds, self._rounds = self._rounds, {}
        return [j for _, judged in sorted(rounds.items()) for j in judged]
