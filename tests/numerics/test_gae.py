"""GAE: what must hold for any input, not only for the hand-computed ones."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_cli.algorithms.gae import gae, plain_gae, score_on_last_token
from tests.support.batches import SEEDS, quick, random_batch, rng


def gae_of_a_row(
    rewards: list[float], values: list[float], gamma: float, lam: float, end: float
) -> tuple[list[float], list[float]]:
    """The textbook recurrence over one row without masked tokens, in float64."""
    advantages: list[float] = []
    carry, next_value = 0.0, end
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        carry = reward + gamma * next_value - value + gamma * lam * carry
        next_value = value
        advantages.append(carry)
    advantages.reverse()
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


@quick
@given(
    seed=SEEDS,
    length=st.one_of(st.integers(1, 20), st.integers(120, 300)),
    density=st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0]),
    prefix=st.booleans(),
    gamma=st.sampled_from([0.0, 0.9, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.8, 0.95, 1.0]),
    with_bootstrap=st.booleans(),
)
def test_gae_is_the_plain_recurrence_on_the_trainable_tokens(
    seed: int, length: int, density: float, prefix: bool, gamma: float, lam: float, with_bootstrap: bool
) -> None:
    rewards_BT, values_BT, mask_BT = random_batch(seed, 3, length, density, prefix=prefix)
    bootstrap_B = torch.randn(3, generator=rng(seed + 1)) if with_bootstrap else None
    results = [
        form(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam, bootstrap=bootstrap_B) for form in (gae, plain_gae)
    ]
    for b, on_T in enumerate(mask_BT):
        end = 0.0 if bootstrap_B is None else float(bootstrap_B[b])
        expected = gae_of_a_row(rewards_BT[b][on_T].tolist(), values_BT[b][on_T].tolist(), gamma, lam, end)
        for got in results:
            for got_BT, expected_row in zip(got, expected, strict=True):
                assert not got_BT[b][~on_T].any()
                torch.testing.assert_close(got_BT[b][on_T], torch.tensor(expected_row), rtol=1e-4, atol=2e-5)


@quick
@given(seed=SEEDS, length=st.integers(1, 200), prefix=st.booleans(), per_row=st.booleans())
def test_the_scan_and_the_definition_of_gae_agree(seed: int, length: int, prefix: bool, per_row: bool) -> None:
    batch = random_batch(seed, 5, length, 0.8, prefix=prefix)
    lam = torch.rand(5, generator=rng(seed + 2)) if per_row else 0.95
    options = {"gamma": 0.98, "lam": lam, "bootstrap": torch.randn(5, generator=rng(seed + 1))}
    soiled = [torch.where(batch[2], x, math.nan) for x in batch[:2]]
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    definition = plain_gae(*(x.double() for x in soiled), batch[2], **wide)
    for fast_BT, plain_BT in zip(gae(*soiled, batch[2], **options), definition, strict=True):
        torch.testing.assert_close(fast_BT, plain_BT.float(), rtol=1e-4, atol=2e-5)


@quick
@given(
    seed=SEEDS,
    length=st.one_of(st.integers(1, 20), st.integers(100, 300)),
    padding=st.integers(0, 300),
    prefix=st.booleans(),
    with_bootstrap=st.booleans(),
)
def test_a_row_of_gae_does_not_depend_on_padding_or_other_rows(
    seed: int, length: int, padding: int, prefix: bool, with_bootstrap: bool
) -> None:
    rewards_BT, values_BT, mask_BT = random_batch(seed, 4, length, 0.8, prefix=prefix)
    bootstrap_B = torch.randn(4, generator=rng(seed + 1)) if with_bootstrap else None
    alone = gae(
        rewards_BT[2:3],
        values_BT[2:3],
        mask_BT[2:3],
        gamma=0.99,
        lam=0.95,
        bootstrap=None if bootstrap_B is None else bootstrap_B[2:3],
    )
    # Rows with holes next to it may send the whole block down another path.
    wide = [torch.nn.functional.pad(x, (0, padding), value=math.nan) for x in (rewards_BT, values_BT)]
    wide_mask_BT = torch.nn.functional.pad(mask_BT, (0, padding))
    wide_mask_BT[0, ::3] = False
    wide_mask_BT[1] = False
    together = gae(*wide, wide_mask_BT, gamma=0.99, lam=0.95, bootstrap=bootstrap_B)
    for a_BT, b_BT in zip(alone, together, strict=True):
        assert torch.equal(a_BT[0], b_BT[2, :length])
        assert not b_BT[2, length:].any()


def test_gae_is_the_same_for_any_number_of_rows_and_threads() -> None:
    rewards_BT, values_BT, mask_BT = random_batch(0, 300, 257, 0.9)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = gae(rewards_BT, values_BT, mask_BT, gamma=1.0, lam=0.95)
        torch.set_num_threads(2)
        parts = [
            gae(rewards_BT[i : i + 7], values_BT[i : i + 7], mask_BT[i : i + 7], gamma=1.0, lam=0.95)
            for i in range(0, 300, 7)
        ]
    finally:
        torch.set_num_threads(threads)
    for whole_BT, part in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(whole_BT, torch.cat(part))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("prefix", [True, False])
def test_garbage_in_masked_slots_does_not_change_gae(garbage: float, prefix: bool) -> None:
    rewards_BT, values_BT, mask_BT = random_batch(1, 5, 200, 0.7, prefix=prefix)
    clean = gae(rewards_BT, values_BT, mask_BT, gamma=0.99, lam=0.95)
    dirty = gae(
        torch.where(mask_BT, rewards_BT, torch.tensor(garbage)),
        torch.where(mask_BT, values_BT, torch.tensor(garbage)),
        mask_BT.float() * 2,
        gamma=0.99,
        lam=0.95,
    )
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_gae_of_nothing_is_nothing(shape: tuple[int, int]) -> None:
    empty = torch.zeros(shape)
    assert [x.shape for x in gae(empty, empty, empty.bool(), gamma=1.0, lam=1.0)] == [shape, shape]
    assert score_on_last_token(torch.zeros(shape[0]), empty).shape == shape


def test_gae_takes_half_precision_and_strided_inputs() -> None:
    rewards_BT, values_BT, mask_BT = random_batch(2, 6, 150, 0.8)
    rewards_BT, values_BT = rewards_BT.bfloat16(), values_BT.bfloat16()
    expected = gae(rewards_BT.float(), values_BT.float(), mask_BT, gamma=1.0, lam=0.9)
    strided = [x.t().contiguous().t() for x in (rewards_BT, values_BT, mask_BT)]
    got = gae(*strided, gamma=1.0, lam=0.9)
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(got, expected, strict=True))


def test_the_score_goes_to_the_last_trainable_token_of_each_row() -> None:
    mask_BT = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]])
    got_BT = score_on_last_token(torch.tensor([2.0, 3.0, math.nan, 5.0]), mask_BT)
    assert got_BT.tolist() == [[0, 2, 0, 0], [0, 0, 3, 0], [0, 0, 0, 0], [0, 0, 0, 5]]
