"""Groups of equal rewards are dropped and more prompts drawn, whatever the number of workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from relax_cli.checkpoint.resume import ResumeDecision
from relax_cli.config.schema import BatchSection, Config
from relax_cli.data.rewards import RewardResult
from relax_cli.engine.sampling import DrawnSampling, Sampling, sampling_of
from relax_cli.engine.session import RolloutGroup
from relax_cli.roles.pool import has_signal
from relax_cli.roles.spread import Spread
from tests.support.rollout_workers import SIZE, Worker, Workers


def batch(**changes: int) -> BatchSection:
    """Four prompts in a batch."""
    return BatchSection(**{"rollout_batch_size": 4, "n_samples_per_prompt": SIZE, "dynamic_sampling": True, **changes})


def counts(shares: list[dict[str, Spread]]) -> dict[str, float]:
    """What was counted."""
    return {name.removeprefix("sampling/"): spread.mean for name, spread in shares[-1].items()}


EVEN: Callable[[int], bool] = lambda place: place % 2 == 0  # noqa: E731
NEVER: Callable[[int], bool] = lambda place: False  # noqa: E731
ALWAYS: Callable[[int], bool] = lambda place: True  # noqa: E731
RARE: Callable[[int], bool] = lambda place: place % 16 > 0  # noqa: E731


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(
    ("dull", "changes", "kept", "expected"),
    [
        (NEVER, {}, [0, 1, 2, 3], {"prompts": 4, "rounds": 1, "no_signal_frac": 0, "filled_frac": 0}),
        (EVEN, {}, [1, 3, 5, 7], {"prompts": 8, "rounds": 2, "no_signal_frac": 0.5, "filled_frac": 0}),
        # What a round drew beyond the batch is not trained on.
        (EVEN, {"over_sampling_batch_size": 12}, [1, 3, 5, 7], {"prompts": 12, "rounds": 1, "no_signal_frac": 0.5}),
        # At the bound the first groups without a signal complete the batch, all in the order of the data.
        (EVEN, {"dynamic_sampling_max_rounds": 1}, [0, 1, 2, 3], {"prompts": 4, "rounds": 1, "filled_frac": 0.5}),
        (RARE, {"dynamic_sampling_max_rounds": 5}, [0, 1, 2, 16], {"prompts": 20, "rounds": 5, "filled_frac": 0.5}),
        (ALWAYS, {}, [0, 1, 2, 3], {"prompts": 40, "rounds": 10, "no_signal_frac": 1, "filled_frac": 1}),
    ],
)
def test_a_batch_is_the_first_groups_with_a_signal(
    workers: int, dull: Callable[[int], bool], changes: dict[str, int], kept: list[int], expected: dict[str, float]
) -> None:
    ranks = Workers(workers, dull)
    shares = DrawnSampling(Config(batch=batch(**changes)), 100 * 16).generate(RolloutGroup(ranks), 3)
    assert ranks.kept == [(2 * i + s, i, f"prompt {1600 + place}") for i, place in enumerate(kept) for s in (0, 1)]
    counted = counts(shares)
    assert {name: counted[name] for name in expected} == expected
    assert counted["response_tokens"] == sum(2 * ((1600 + place) % 3 + 1) for place in range(int(counted["prompts"])))


def test_the_next_rollout_begins_where_the_last_has_drawn() -> None:
    ranks, sampling = Workers(2, EVEN), DrawnSampling(Config(batch=batch()), 0)
    whole = []
    for rollout_id in range(4):
        sampling.generate(RolloutGroup(ranks), rollout_id)
        whole.append(ranks.kept)
        sampling.finish()
    assert sampling.drawn == 32
    assert [prompt for step in whole for _, _, prompt in step][::2] == [f"prompt {i}" for i in range(1, 32, 2)]
    resumed = DrawnSampling(Config(batch=batch()), 16)
    for rollout_id in (2, 3):
        resumed.generate(RolloutGroup(ranks), rollout_id)
        assert ranks.kept == whole[rollout_id]
        resumed.finish()
    assert resumed.drawn == 32


def test_after_a_failure_only_what_is_missing_is_sampled() -> None:
    ranks, sampling = Workers(2, EVEN), DrawnSampling(Config(batch=batch()), 0)
    ranks.workers[1].draw = lambda *_: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        sampling.generate(RolloutGroup(ranks), 0)
    del ranks.workers[1].draw
    shares = sampling.generate(RolloutGroup(ranks), 0)
    assert [worker.sampled for worker in ranks.workers] == [8, 8]
    assert counts(shares)["prompts"] == 8
    sampling.finish()
    assert sampling.drawn == 8


@pytest.mark.parametrize(
    ("rewards", "trains", "signal"),
    [
        ((0.0, 1.0), (True, True), True),
        ((1.0, 1.0), (True, True), False),
        ((0.0, 1.0), (True, False), False),
        ((0.0, 1.0), (False, False), False),
        ((0.0, 0.0, 1.0), (True, False, True), True),
    ],
)
def test_only_samples_that_train_give_a_signal(
    rewards: tuple[float, ...], trains: tuple[bool, ...], signal: bool
) -> None:
    sample = Worker(0, 1, NEVER).sample(0, 0, 0)
    group = [
        replace(sample, result=RewardResult(reward, {}), trains=part)
        for reward, part in zip(rewards, trains, strict=True)
    ]
    assert has_signal(group) is signal


def test_a_run_continues_behind_the_prompts_of_the_other_kind() -> None:
    def sampling(prompts_seen: int | None, dynamic: bool) -> Sampling:
        start = SimpleNamespace(decision=ResumeDecision("resume", 3), prompts_seen=prompts_seen)
        config = Config(batch=batch(dynamic_sampling=dynamic))
        return sampling_of(config, RolloutGroup(Workers(1, NEVER)), start, {})  # type: ignore[arg-type]

    assert sampling(17, dynamic=False).position(RolloutGroup(Workers(1, NEVER))) == {}
    assert sampling(17, dynamic=True).position(RolloutGroup(Workers(1, NEVER))) == {"prompts_drawn": 17}
    assert sampling(None, dynamic=True).position(RolloutGroup(Workers(1, NEVER))) == {"prompts_drawn": 12}
