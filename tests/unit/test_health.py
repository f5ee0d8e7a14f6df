"""A policy that has died is noticed, once; a low, flat or finished one is not taken for it."""

from __future__ import annotations

import pytest

from relax_cli.engine.health import PATIENCE, PolicyHealth

STEPS = 2
Rollout = tuple[float, float, float, float]
"""Lowest, mean and highest reward, and skipped optimizer steps of two."""

ALIVE: Rollout = (0.0, 0.5, 1.0, 0.0)
DEAD: Rollout = (0.0, 0.0, 0.0, 0.0)
SOLVED: Rollout = (1.0, 1.0, 1.0, 0.0)
SKIPPED: Rollout = (0.0, 0.5, 1.0, 2.0)
PARTLY: Rollout = (0.0, 0.5, 1.0, 1.0)

CASES: dict[str, tuple[list[Rollout], list[int], bool]] = {
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


@pytest.mark.parametrize("case", CASES)
def test_what_counts_as_dead(case: str) -> None:
    rollouts, expected, is_alive = CASES[case]
    health, warned = PolicyHealth(), []
    for number, (low, mean, high, skipped) in enumerate(rollouts):
        steps = {"actor/skipped_steps": skipped, "actor/optimizer_steps": STEPS - skipped}
        rewards = {"reward/min": low, "reward/mean": mean, "reward/max": high}
        if health.observe(number, rewards | steps) is not None:
            warned.append(number)
    assert (warned, health.is_alive) == (expected, is_alive)


def test_a_rollout_without_an_actor_step_is_no_skipped_one() -> None:
    health = PolicyHealth()
    metrics = {"reward/min": 0.0, "reward/mean": 0.5, "reward/max": 1.0}
    assert [health.observe(number, metrics) for number in range(5)] == [None] * 5
