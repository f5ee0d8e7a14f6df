"""Learning-rate schedules against transformers', step by step, and what must hold for any of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from relax_cli.algorithms.schedule import Schedule
from relax_cli.config.schema import OptimizerSection
from tests.support.batches import quick

PEAK = 1e-3
DECAYS = ("constant", "linear", "cosine")
THEIRS = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def ours(decay: str, warmup: int, total: int, floor: float = 0.0, *, steps: int | None = None) -> list[float]:
    steps = total if steps is None else steps
    schedule = Schedule(OptimizerSection(lr_decay_style=decay, min_lr=floor), PEAK, warmup, total)  # type: ignore[arg-type]
    return [schedule.rate(k) for k in range(steps)]


def theirs(name: str, warmup: int, total: int, **options: float) -> list[float]:
    """The rates that transformers' scheduler hands to the optimizer steps 0 to `total - 1`."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    scheduler = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=options or None)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 2), (0, 4), (0, 57), (1, 4), (3, 10), (9, 10), (20, 100)])
def test_rates_are_those_of_transformers(decay: str, warmup: int, total: int) -> None:
    found, expected = ours(decay, warmup, total), theirs(THEIRS[decay], warmup, total)
    assert found[warmup:] == pytest.approx(expected[warmup:], rel=1e-12)
    # Theirs begins a warm-up at rate 0 and wastes that step; ours begins with the rate that theirs has next.
    assert found[:warmup] == pytest.approx([*expected[1:warmup], PEAK][:warmup], rel=1e-12)


@pytest.mark.parametrize(("warmup", "total"), [(0, 5), (2, 30)])
def test_a_floor_is_that_of_transformers_cosine_with_min_lr(warmup: int, total: int) -> None:
    expected = theirs("cosine_with_min_lr", warmup, total, min_lr=2e-4)
    assert ours("cosine", warmup, total, 2e-4)[warmup:] == pytest.approx(expected[warmup:], rel=1e-12)


def test_four_steps_of_linear_decay_by_hand() -> None:
    assert ours("linear", 0, 4) == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


@quick
@given(
    decay=st.sampled_from(DECAYS),
    warmup=st.integers(0, 50),
    total=st.integers(1, 60),
    floor=st.sampled_from([0.0, 1e-5, PEAK]),
)
def test_no_step_is_wasted_and_rates_fall_after_warm_up(decay: str, warmup: int, total: int, floor: float) -> None:
    rates = ours(decay, warmup, total, floor, steps=total + 5)
    assert all(rate > 0 for rate in rates)
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    after = rates[warmup:]
    assert after == sorted(after, reverse=True)
    assert all(floor <= rate <= PEAK for rate in after)
    if not warmup:
        assert rates[0] == PEAK
