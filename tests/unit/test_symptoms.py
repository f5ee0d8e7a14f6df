"""Warnings of a run's health: seen when they should be, once, and not in runs that are well."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from relax_cli.tracking.symptoms import FLAT_FOR, MEMORY, NEGATIVE_FOR, PATIENCE, SYMPTOMS, HealthWatch

STEPS = 2
Rollout = tuple[float, float, float, float]
"""Lowest, mean and highest reward, and skipped optimizer steps of two."""

ALIVE: Rollout = (0.0, 0.5, 1.0, 0.0)
DEAD: Rollout = (0.0, 0.0, 0.0, 0.0)
SOLVED: Rollout = (1.0, 1.0, 1.0, 0.0)
SKIPPED: Rollout = (0.0, 0.5, 1.0, 2.0)
PARTLY: Rollout = (0.0, 0.5, 1.0, 1.0)

DEATHS: dict[str, tuple[list[Rollout], list[int], bool]] = {
    "dies": ([ALIVE, *[DEAD] * 6], [PATIENCE], False),
    "dies at a negative reward": ([ALIVE, *[(-1.0, -1.0, -1.0, 0.0)] * 4], [PATIENCE], False),
    "dies after it was solved": ([ALIVE, SOLVED, *[DEAD] * 3], [PATIENCE + 1], False),
    "two bad rollouts": ([ALIVE, DEAD, DEAD, ALIVE, DEAD, DEAD], [], False),
    "comes back": ([ALIVE, DEAD, DEAD, ALIVE], [], True),
    "dies twice": ([ALIVE, *[DEAD] * 3, ALIVE, *[DEAD] * 3], [PATIENCE, 2 * PATIENCE + 1], False),
    "solved": ([ALIVE, *[SOLVED] * 5], [], True),
    "never had a reward": ([DEAD] * 6, [], True),
    "low but not flat": ([ALIVE, *[(0.0, 0.01, 1.0, 0.0)] * 5], [], True),
    "NaN": ([ALIVE, *[(float("nan"),) * 3 + (0.0,)] * 3], [PATIENCE], False),
    "every step skipped": ([SKIPPED] * 5, [PATIENCE - 1], True),
    "some steps skipped": ([PARTLY] * 5, [], True),
}


@pytest.mark.parametrize("case", DEATHS)
def test_what_counts_as_dead(case: str) -> None:
    rollouts, expected, is_alive = DEATHS[case]
    watch, warned = HealthWatch(), []
    for number, (low, mean, high, skipped) in enumerate(rollouts):
        steps = {"actor/skipped_steps": skipped, "actor/optimizer_steps": STEPS - skipped}
        rewards = {"reward/min": low, "reward/mean": mean, "reward/max": high}
        if {w["id"] for w in watch.observe(number, rewards | steps)} & {"policy-died", "steps-skipped"}:
            warned.append(number)
    assert (warned, watch.history.is_alive) == (expected, is_alive)


WELL: dict[str, Any] = {
    "reward/min": 0.0,
    "reward/mean": 0.5,
    "reward/max": 1.0,
    "truncated_frac": 0.5,
    "pg_loss": 0.1,
    "pg_clip_frac": 0.1,
    "ppo_kl": 0.01,
    "entropy": 1.0,
    "value_clip_frac": 0.1,
    "explained_variance": 0.5,
    "critic/value_head_moved": 0.1,
    "actor/grad_norm": 1.0,
    "critic/grad_norm": 1.0,
    "train_rollout_logprob_diff/mean": 1e-6,
    "groups/no_signal_frac": 0.2,
    "actor/skipped_steps": 0.0,
    "actor/optimizer_steps": 2.0,
}


def metrics(number: int, **more: Any) -> dict[str, Any]:
    """A step of a run that is well: its reward rises."""
    return WELL | {"reward/mean": 0.3 + number / 1000} | {name.replace("__", "/"): v for name, v in more.items()}


EQUAL = {"reward__min": 0.25, "reward__mean": 0.25, "reward__max": 0.25}
SEEN: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    # What the last steps have, for how many steps, and what is just not enough.
    "policy-died": (EQUAL, 3, EQUAL | {"reward__max": 0.5}),
    "all-truncated": ({"truncated_frac": 1.0}, 3, {"truncated_frac": 0.99}),
    "reward-flat": ({"reward__mean": 0.3}, FLAT_FOR, {}),
    "clip-fraction": ({"pg_clip_frac": 0.31}, 3, {"pg_clip_frac": 0.3}),
    "kl-large": ({"ppo_kl": 0.11}, 3, {"ppo_kl": 0.1}),
    "value-clip": ({"value_clip_frac": 0.51}, 3, {"value_clip_frac": 0.5}),
    "value-head-still": ({"critic__value_head_moved": 0.0}, 3, {"critic__value_head_moved": 1e-9}),
    "explained-variance": ({"explained_variance": -0.1}, NEGATIVE_FOR, {"explained_variance": 0.0}),
    "logprob-diff": (
        {"train_rollout_logprob_diff__mean": 0.11}, 3, {"train_rollout_logprob_diff__mean": 0.1},
    ),
    "no-signal": ({"groups__no_signal_frac": 0.91}, 3, {"groups__no_signal_frac": 0.9}),
    "dynamic-sampling-bound": ({"sampling__filled_frac": 0.1}, 3, {"sampling__filled_frac": 0.0}),
    "entropy-collapse": ({"entropy": 0.04, "reward__mean": 0.2}, 3, {"entropy": 0.04}),
    "grad-norm-spike": ({"critic__grad_norm": 11.0}, 1, {"critic__grad_norm": 9.0}),
    "steps-skipped": (
        {"actor__skipped_steps": 2.0, "actor__optimizer_steps": 0.0}, 3,
        {"actor__skipped_steps": 1.0, "actor__optimizer_steps": 1.0},
    ),
}  # fmt: skip


def ids_of(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The warnings of each step."""
    watch = HealthWatch()
    return [[warned["id"] for warned in watch.observe(number, row)] for number, row in enumerate(rows, 1)]


@pytest.mark.parametrize("symptom", SEEN)
def test_a_symptom_is_named_once_and_only_when_it_is_there(symptom: str) -> None:
    ill, needed, almost = SEEN[symptom]
    before = [metrics(number) for number in range(20)]
    after = range(20, 20 + needed + 3)
    found = ids_of([*before, *(metrics(number, **ill) for number in after)])
    assert found.count([symptom]) == 1
    assert sum(map(len, found)) == 1, found
    if symptom != "reward-flat":
        assert found.index([symptom]) == len(before) + needed - 1
    assert not any(ids_of([*before, *(metrics(number, **almost) for number in after)]))


def test_every_symptom_has_a_case() -> None:
    assert {symptom.id for symptom in SYMPTOMS} == {*SEEN, "rewards-equal"}


def test_equal_rewards_are_named_where_nothing_fell() -> None:
    found = ids_of([WELL | {"reward/min": 1.0, "reward/mean": 1.0, "reward/max": 1.0}] * 6)
    assert found == [[], [], ["rewards-equal"], [], [], []]


def test_a_symptom_that_went_away_is_named_again() -> None:
    ill, well = metrics(1, truncated_frac=1.0), metrics(1)
    found = ids_of([*[ill] * 5, well, *[ill] * 5])
    assert [number for number, ids in enumerate(found, 1) if ids] == [3, 9]
    spike = metrics(1, actor__grad_norm=50.0)
    rows = [well] * 10 + [spike, well] * 5 + [well] * 20 + [spike]
    named = [number for number, ids in enumerate(ids_of(rows), 1) if "grad-norm-spike" in ids]
    assert named == [11, 41]


def test_a_resumed_run_knows_what_was_named_before() -> None:
    rows = [metrics(1, truncated_frac=1.0) | {"step": step} for step in range(1, 7)]
    watch = HealthWatch()
    watch.remember([{"step": 0, "eval/held/reward/mean": 1.0}, *rows[:4]])
    assert [watch.observe(row["step"], row) for row in rows[4:]] == [[], []]


def test_a_run_that_is_well_gets_no_warning() -> None:
    assert not any(ids_of([metrics(number) for number in range(3 * MEMORY)]))


def test_metrics_that_are_missing_or_broken_are_no_symptom() -> None:
    rewards = {name: value for name, value in WELL.items() if name.startswith("reward/")}
    broken = {name: float("nan") for name in WELL} | rewards
    rows = [rewards, broken] * MEMORY
    assert {name for ids in ids_of(rows) for name in ids} <= {"reward-flat"}


def test_the_page_lists_every_warning_with_what_to_look_at() -> None:
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE))
    assert rows == {symptom.id: symptom.look_at for symptom in SYMPTOMS}
