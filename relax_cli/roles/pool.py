"""What a rollout worker has sampled but not given away: groups that a rollout chooses from, and prompts in flight.

With `--partial-rollout` responses grow part by part: one may take several rollouts, and then has tokens of several
weights. Prompts belong to workers by their place among all that were drawn, so nothing has to move, and nothing that is
sampled depends on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from relax_cli.backends.rollout.protocol import Generation, Request, newest_routes
from relax_cli.config.schema import LEAST_PART, RolloutSection
from relax_cli.data.prompts import Prompt
from relax_cli.roles.carried import Begun, BegunGroup
from relax_cli.roles.judging import Judged, Sampled
from relax_cli.roles.spread import Spread

POOL_STREAM = 1 << 41
"""Stands for the rollout id in the seeds of prompts in flight, which do not know in which rollout they will end."""


@dataclass(frozen=True)
class DrawnGroup:
    """What is reported of the samples of one prompt."""

    place: int
    """Of the prompt among those that the rollout has drawn."""
    has_signal: bool
    tokens: int
    """Of all responses."""
    reward: float
    """Mean of its samples whose reward did not fail; 0 where all did."""

    @classmethod
    def of(cls, group: Sequence[Judged]) -> DrawnGroup:
        """The report of these samples."""
        reward = Spread.of(j.result.reward for j in group if not j.result.failed).mean
        return cls(group[0].group, has_signal(group), sum(len(j.generation.tokens) for j in group), reward)


def has_signal(group: Sequence[Judged]) -> bool:
    """Whether the rewards of a prompt's samples that train differ: else every advantage within the group is 0."""
    return len({j.result.reward for j in group if j.trains}) > 1


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
        return [DrawnGroup.of(judged[i : i + size]) for i in range(0, len(judged), size)]

    def leave(self) -> list[Judged]:
        """Everything drawn, in the order of the data; nothing of it is kept."""
        rounds, self._rounds = self._rounds, {}
        return [j for _, judged in sorted(rounds.items()) for j in judged]


@dataclass(frozen=True)
class Progress:
    complete: list[DrawnGroup]
    """All prompts of this worker whose responses are finished."""
    tokens: int
    """Sampled in this part."""


@dataclass(frozen=True)
class Work:
    """What a worker does for its pool."""

    prompt: Callable[[int], tuple[Prompt, list[int]]]
    """Of a row of the data, and its tokens."""
    seed: Callable[[int], int]
    """Of a sample's number."""
    generate: Callable[[Sequence[Request]], list[Generation]]
    judge: Callable[[Sequence[Sampled]], list[Judged]]


class Pool:
    """The prompts in flight on worker `rank` of `workers`."""

    def __init__(self, samples_per_prompt: int, section: RolloutSection, work: Work, rank: int, workers: int) -> None:
        self._size = samples_per_prompt
        self._most_tokens = section.rollout_max_response_len
        self._part = section.tokens_per_part
        self._work = work
        self._rank, self._workers = rank, workers
        self._groups: dict[int, BegunGroup] = {}
        self._judged: dict[int, list[Judged]] = {}
        self._rollout_id = -1
        self._parts: list[Progress] = []

    def advance(self, rollout_id: int, part: int, begun: Iterable[tuple[int, int]]) -> Progress:
        """Let every unfinished response grow by part number `part`, unless that was done before.

        Args:
            rollout_id: also the version of the weights that sample it.
            begun: place and row of prompts that are new.
        """
        if rollout_id != self._rollout_id:
            self._rollout_id, self._parts = rollout_id, []
        if part == len(self._parts):
            new = [BegunGroup(place, row, [Begun() for _ in range(self._size)]) for place, row in begun]
            self.add(group for group in new if group.place not in self._groups)
            tokens = self._grow(rollout_id)
            self._judge()
            complete = [DrawnGroup.of(judged) for _, judged in sorted(self._judged.items())]
            self._parts.append(Progress(complete, tokens))
        return self._parts[part]

    def add(self, groups: Iterable[BegunGroup]) -> None:
        """Take over those of some prompts that belong to this worker."""
        self._groups |= {group.place: group for group in groups if group.place % self._workers == self._rank}

    def leave(self, places: Iterable[int]) -> list[Judged]:
        """The samples of complete prompts, which leave the pool."""
        own = sorted(set(places) & self._judged.keys())
        for place in own:
            del self._groups[place]
        return [judged for place in own for judged in self._judged.pop(place)]

    def carried(self) -> list[BegunGroup]:
        return list(self._groups.values())

    def _grow(self, version: int) -> int:
        growing: list[Begun] = []
        requests: list[Request] = []
        for place, group in sorted(self._groups.items()):
            if group.is_complete:
                continue
            prompt, ids = self._work.prompt(group.row)
            for i, response in enumerate(group.responses):
                left = self._most_tokens - len(response.tokens)
                if left <= 0:
                    # The limit of the run that began it was higher.
                    response.finish_reason = response.finish_reason or "length"
                if response.finish_reason is None:
                    # No short last part: SGLang takes prompts only up to 7 tokens below its context.
                    most = left if left < self._part + min(self._part, LEAST_PART) else self._part
                    seed = self._work.seed(place * self._size + i)
                    tokens, sampled = (*ids, *response.tokens), len(response.tokens)
                    requests.append(Request(tokens, seed, prompt.source, most_tokens=most, sampled=sampled))
                    growing.append(response)
        generations = self._work.generate(requests) if requests else []
        for response, generation in zip(growing, generations, strict=True):
            response.tokens += generation.tokens
            response.log_probs += generation.log_probs
            response.routes = newest_routes(response.routes, generation.routes)
            response.versions += [version] * len(generation.tokens)
            if generation.finish_reason == "stop" or len(response.tokens) >= self._most_tokens:
                response.finish_reason = generation.finish_reason
        return sum(len(generation.tokens) for generation in generations)

    def _judge(self) -> None:
        new = [g for place, g in sorted(self._groups.items()) if g.is_complete and place not in self._judged]
        samples = []
        for group in new:
            prompt, ids = self._work.prompt(group.row)
            for i, response in enumerate(group.responses):
                assert response.finish_reason is not None, "only complete prompts are judged"
                generation = Generation(
                    response.tokens, response.log_probs, response.finish_reason, response.versions, response.routes
                )
                samples.append(Sampled(group.place * self._size + i, group.place, prompt, ids, generation))
        judged = self._work.judge(samples) if samples else []
        for i, group in enumerate(new):
            self._judged[group.place] = judged[i * self._size : (i + 1) * self._size]
