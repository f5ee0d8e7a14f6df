"""Responses that a rollout leaves unfinished continue in the next: for any number of workers, and after a resume."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from relax_cli.backends.rollout.protocol import Generation, Request
from relax_cli.config.schema import Config
from relax_cli.data.prompts import Prompt
from relax_cli.data.rewards import RewardResult
from relax_cli.engine.sampling import PartialSampling
from relax_cli.engine.session import RolloutGroup
from relax_cli.roles.carried import Begun, BegunGroup, from_arrays, to_arrays
from relax_cli.roles.judging import Judged, Sampled
from relax_cli.roles.pool import Pool, Progress, Work, renumbered
from relax_cli.roles.spread import Spread
from tests.support.rollout_workers import InOrder

SIZE, PART, LONGEST = 2, 3, 11


def length_of(seed: int) -> int:
    """Tokens up to the stop token; above the limit it is never reached."""
    return 1 + seed * 5 % (LONGEST + 3)


class Worker:
    """A worker whose engine counts: token `i` of a response is `1000 * rollout + i`."""

    def __init__(self, rank: int, workers: int, config: Config) -> None:
        self.rollout_id = -1
        self.asked: list[Request] = []
        work = Work(
            prompt=lambda row: (Prompt(f"row {row}", None, {}, ""), [9]),
            seed=lambda number: number,
            generate=self.generate,
            judge=self.judge,
        )
        self.pool = Pool(SIZE, config.rollout, work, rank, workers)
        self.kept: list[Judged] = []

    def places(self, first: int, count: int) -> list[int]:
        return [place % 50 for place in range(first, first + count)]

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        self.asked += requests
        found = []
        for request in requests:
            assert request.most_tokens is not None
            begun, most = request.sampled, request.most_tokens
            count = min(most, length_of(request.seed) - begun)
            tokens = [1000 * self.rollout_id + begun + i for i in range(count)]
            ends = begun + count == length_of(request.seed)
            # Of what it has not sampled now, it knows the first layer's experts alone.
            routes = np.full((1 + begun + count - 1, 2, 1), self.rollout_id, np.int16)
            routes[:begun, 1] = -1
            end: Any = "stop" if ends else "length"
            found.append(Generation(tokens, [-float(t) for t in tokens], end, routes=routes))
        return found

    def judge(self, samples: Sequence[Sampled]) -> list[Judged]:
        # Every third prompt has equal rewards.
        rewards = [float(s.row % SIZE if s.group % 3 else 1) for s in samples]
        return [Judged(**vars(s), response="", result=RewardResult(r)) for s, r in zip(samples, rewards, strict=True)]

    def advance(self, rollout_id: int, part: int, begun: Iterable[tuple[int, int]]) -> Progress:
        self.rollout_id = rollout_id
        return self.pool.advance(rollout_id, part, begun)

    def keep(self, rollout_id: int, chosen: Sequence[int], dropped: Sequence[int]) -> dict[str, Spread]:
        self.kept = renumbered(self.pool.leave([*chosen, *dropped]), chosen, SIZE)
        return {}

    def carried(self) -> list[BegunGroup]:
        return self.pool.carried()

    def carry(self, groups: Sequence[BegunGroup]) -> None:
        self.pool.add(groups)


class Workers(InOrder):
    """Several of them."""

    def __init__(self, count: int, config: Config) -> None:
        super().__init__([Worker(rank, count, config) for rank in range(count)])


def config(**batch: Any) -> Config:
    """Four prompts in a batch and seven in flight."""
    return Config(
        batch={"rollout_batch_size": 4, "n_samples_per_prompt": SIZE, "over_sampling_batch_size": 7, **batch},
        rollout={"partial_rollout": True, "partial_rollout_len": PART, "rollout_max_response_len": LONGEST},
    )


class Run:
    """Rollouts, one after the other."""

    def __init__(self, workers: int, *, saved: dict[str, Any] | None = None, **batch: Any) -> None:
        self.ranks = Workers(workers, config(**batch))
        self.rollout = RolloutGroup(self.ranks)
        carried = from_arrays(saved["sampling"], SIZE) if saved else []
        self.rollout.carry(carried)
        drawn = saved["prompts_drawn"] if saved else 0
        self.sampling = PartialSampling(config(**batch), drawn, None, [(g.place, g.row) for g in carried])
        self.metrics: dict[str, float] = {}

    def step(self, rollout_id: int) -> list[Any]:
        """What the batch is: row and tokens, versions, log-probabilities of each sample."""
        *_, metrics = self.sampling.generate(self.rollout, rollout_id)
        self.metrics = {name: spread.mean for name, spread in metrics.items()}
        self.sampling.finish()
        kept = sorted((j.row, j) for worker in self.ranks.workers for j in worker.kept)
        assert [row for row, _ in kept] == list(range(4 * SIZE))
        return [
            (j.group, j.prompt.content, vars(j.generation) | {"routes": j.generation.routes.tolist()})
            for _, j in kept
            if j.generation.routes is not None
        ]


@pytest.mark.parametrize("dynamic", [False, True])
def test_neither_workers_nor_a_resume_change_a_response(dynamic: bool) -> None:
    one = Run(1, dynamic_sampling=dynamic)
    whole = [one.step(rollout_id) for rollout_id in range(8)]
    for workers in (2, 3):
        other = Run(workers, dynamic_sampling=dynamic)
        assert [other.step(rollout_id) for rollout_id in range(3)] == whole[:3]
        saved = other.sampling.position(other.rollout)
        resumed = Run(4 - workers, saved=saved, dynamic_sampling=dynamic)
        assert [resumed.step(rollout_id) for rollout_id in range(3, 8)] == whole[3:]
        again = resumed.sampling.position(resumed.rollout)
        assert {name: value.tolist() for name, value in again["sampling"].items()} == {
            name: value.tolist() for name, value in one.sampling.position(one.rollout)["sampling"].items()
        }
    assert {content for step in whole for _, content, _ in step} <= {f"row {row}" for row in range(50)}


def test_routes_are_those_of_the_newest_pass() -> None:
    run = Run(2)
    for generation in (generation for rollout_id in range(8) for *_, generation in run.step(rollout_id)):
        versions, routes = generation["weight_versions"], np.array(generation["routes"])
        assert len(routes) == len(versions)
        # The first layer's are of the last pass, what only an earlier one knew is of that.
        assert routes[:, 0].max() == routes[:, 0].min() == versions[-1]
        assert routes[:, 1, 0].tolist() == versions


def test_each_token_says_which_weights_sampled_it() -> None:
    run = Run(2)
    batches = [run.step(rollout_id) for rollout_id in range(8)]
    ages = []
    for rollout_id, batch in enumerate(batches):
        for index, (_, content, generation) in enumerate(batch):
            tokens, versions = generation["tokens"], generation["weight_versions"]
            assert [token // 1000 for token in tokens] == versions == sorted(versions)
            assert [token % 1000 for token in tokens] == list(range(len(tokens)))
            assert generation["log_probs"] == [-float(token) for token in tokens]
            ages += [rollout_id - version for version in versions]
            whole = length_of(int(content.removeprefix("row ")) * SIZE + index % SIZE)
            assert (len(tokens), generation["finish_reason"]) == (
                (whole, "stop") if whole <= LONGEST else (LONGEST, "length")
            )
    # A response takes at most 4 parts, and waits while at most 6 older prompts are chosen.
    assert 1 <= max(ages) <= 6
    assert run.metrics["partial/carried_prompts"] == 3


def test_a_rollout_ends_with_the_part_that_completes_its_batch() -> None:
    run = Run(1)
    run.step(0)
    parts = int(run.metrics["partial/parts"])
    lengths = [min(LONGEST, max(length_of(p * SIZE), length_of(p * SIZE + 1))) for p in range(7)]
    needed = sorted(-(-length // PART) for length in lengths)[3]
    assert parts == min(needed, LONGEST // PART)
    for rollout_id in (1, 2, 3):
        run.step(rollout_id)
    limits = [request.most_tokens for request in run.ranks.workers[0].asked]
    assert set(limits) <= {PART, LONGEST % PART + PART}, "no short last part"


def test_equal_rewards_are_dropped_and_replaced() -> None:
    run = Run(2, dynamic_sampling=True)
    for rollout_id in range(4):
        for _, content, _ in run.step(rollout_id):
            assert int(content.removeprefix("row ")) % 3 or run.metrics["sampling/filled_frac"] > 0
    assert run.metrics["sampling/filled_frac"] == 0
    assert run.metrics["sampling/prompts"] > 0
    few = Run(1, dynamic_sampling=True, over_sampling_batch_size=5)
    few.step(0)
    assert (few.metrics["sampling/prompts"], few.metrics["sampling/filled_frac"]) == (7, 0), "5, and 2 for the dropped"
    bounded = Run(1, dynamic_sampling=True, dynamic_sampling_max_rounds=1, over_sampling_batch_size=5)
    bounded.step(0)
    assert bounded.metrics["sampling/filled_frac"] == 1 / 4
    assert bounded.metrics["sampling/prompts"] == 5


def test_after_a_failure_no_part_is_sampled_twice() -> None:
    alone = Worker(0, 1, config())
    assert alone.advance(0, 0, [(0, 0)]) == alone.advance(0, 0, [(0, 0)])
    assert len(alone.asked) == SIZE
    expected, run = Run(2), Run(2)
    broken = run.ranks.workers[1]
    working, broken.pool._work = broken.pool._work, Work(**{**vars(broken.pool._work), "generate": lambda _: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        run.step(0)
    broken.pool._work = working
    for rollout_id in range(3):
        assert run.step(rollout_id) == expected.step(rollout_id)
        assert run.metrics == expected.metrics
        counts = [[len(worker.asked) for worker in either.ranks.workers] for either in (run, expected)]
        assert counts[0] == counts[1]


@pytest.mark.parametrize("length", [LONGEST, LONGEST + 1])
def test_a_lower_limit_ends_what_is_as_long(length: int) -> None:
    begun = Begun([1] * length, [-1.0] * length, [0] * length)
    groups = [BegunGroup(0, 5, [begun, Begun([1], [-1.0], [0], "stop")])]
    worker = Worker(0, 1, config())
    worker.carry(groups)
    (group,) = worker.advance(3, 0, []).complete
    assert (group.place, group.tokens, worker.asked) == (0, length + 1, [])
    assert groups[0].responses[0].finish_reason == "length"


def test_what_is_carried_survives_a_checkpoint() -> None:
    groups = [
        BegunGroup(7, 3, [Begun([5, 6], [-0.1, -0.25], [2, 3]), Begun()]),
        BegunGroup(2, 9, [Begun([1], [-1e-9], [1], "stop"), Begun([4] * 3, [-2.0] * 3, [1, 1, 2], "length")]),
    ]
    arrays = to_arrays(groups)
    assert from_arrays(arrays, 2) == [groups[1], groups[0]]
    assert from_arrays({}, 2) == from_arrays(to_arrays([]), 2) == []
    for change in (
        {"carried_tokens": np.arange(3)},
        {"carried_lengths": np.array([1, 1, 1])},
        {"carried_rows": np.array([1])},
    ):
        with pytest.raises(ValueError, match=r"tokens of|responses to|argument"):
            from_arrays({**arrays, **change}, 2)
    with pytest.raises(ValueError, match="4 responses to 2 prompts"):
        from_arrays(arrays, 4)
