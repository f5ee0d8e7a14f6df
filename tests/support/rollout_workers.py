"""Rollout workers that sample nothing: a prompt is its place in the data, and says whether its rewards are equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from relax_cli.backends.rollout.protocol import Generation
from relax_cli.data.prompts import Prompt
from relax_cli.data.rewards import RewardResult
from relax_cli.engine.session import Ranks
from relax_cli.roles.judging import Judged
from relax_cli.roles.pool import Drawn, DrawnGroup, renumbered
from relax_cli.roles.spread import Spread

SIZE = 2


class Worker:
    """A rollout worker whose reward is right for one sample of each prompt, unless its place in the data is dull."""

    def __init__(self, rank: int, workers: int, dull: Callable[[int], bool]) -> None:
        self.rank, self.workers, self.dull = rank, workers, dull
        self.drawn = Drawn(SIZE)
        self.kept: list[Judged] = []
        self.sampled = 0

    def places(self, first: int, count: int) -> list[int]:
        return list(range(first, first + count))

    def draw(self, rollout_id: int, offset: int, rows: Sequence[int]) -> list[DrawnGroup]:
        low, high = (len(rows) * r // self.workers for r in (self.rank, self.rank + 1))
        return self.drawn.groups(
            rollout_id,
            offset,
            lambda: [self.sample(offset + p, rows[p], s) for p in range(low, high) for s in (0, 1)],
        )

    def sample(self, group: int, place: int, number: int) -> Judged:
        self.sampled += 1
        generation = Generation([1] * (place % 3 + 1), [-1.0] * (place % 3 + 1), "stop")
        reward = float(number if not self.dull(place) else 1)
        prompt = Prompt(f"prompt {place}", None, {}, "")
        return Judged(SIZE * group + number, group, prompt, [7], generation, "", RewardResult(reward, {}))

    def keep(self, rollout_id: int, chosen: Sequence[int], dropped: Sequence[int] = ()) -> dict[str, Spread]:
        self.kept = renumbered(self.drawn.leave(), chosen, SIZE)
        return {"reward": Spread.of(j.result.reward for j in self.kept)}


class InOrder(Ranks[Any]):
    """Workers of this process, called one after the other."""

    def __init__(self, workers: Sequence[Any]) -> None:
        super().__init__("rollout")
        self.workers = workers

    def start(self, request: Callable[[Any], Any]) -> Callable[[], list[Any]]:
        return lambda: [request(worker) for worker in self.workers]

    def on(self, rank: int, request: Callable[[Any], Any]) -> Any:
        return request(self.workers[rank])

    def tell(self, request: Callable[[Any], object]) -> None:
        raise AssertionError


class Workers(InOrder):
    """Several of them."""

    def __init__(self, count: int, dull: Callable[[int], bool]) -> None:
        super().__init__([Worker(rank, count, dull) for rank in range(count)])

    @property
    def kept(self) -> list[tuple[int, int, Any]]:
        found = [(j.row, j.group, j.prompt.content) for worker in self.workers for j in worker.kept]
        return sorted(found)
