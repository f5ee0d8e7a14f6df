"""Losses, groups, reduction and whitening: what must hold for any input, not only for the hand-computed ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import relax_cispo
import relax_gspo
import relax_ppo
import relax_sapo
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from relax_cli import AdvantageInputs, LossInputs, LossTerms
from relax_cli.algorithms.gae import whiten
from relax_cli.algorithms.groups import advantages as group_token_advantages
from relax_cli.algorithms.groups import group_advantages
from relax_cli.algorithms.kl import kl_estimate
from relax_cli.algorithms.reduce import aggregate
from relax_cli.algorithms.surrogate import tis_weight
from relax_cli.algorithms.value_loss import clipped_value_loss
from tests.support.batches import SEEDS, quick, rng

POLICY_LOSSES: dict[str, tuple[Callable[[LossInputs], LossTerms], Any]] = {
    "ppo": (relax_ppo.policy_loss, relax_ppo.PpoOptions()),
    "ppo-dual-clip": (relax_ppo.policy_loss, relax_ppo.PpoOptions(eps_clip_high=0.3, eps_clip_c=2.0)),
    "gspo": (relax_gspo.policy_loss, relax_gspo.GspoOptions()),
    "cispo": (relax_cispo.policy_loss, relax_cispo.CispoOptions()),
    "cispo-by-sign": (relax_cispo.policy_loss, relax_cispo.CispoOptions(cispo_by_sign=True)),
    "sapo": (relax_sapo.policy_loss, relax_sapo.SapoOptions()),
}
each_policy_loss = pytest.mark.parametrize("name", POLICY_LOSSES)


# -- policy and value losses -----------------------------------------------------------------------


def loss_inputs(seed: int, options: Any, *, spread: float = 0.3, dtype: torch.dtype = torch.float32) -> LossInputs:
    g = rng(seed)
    logp_BT = -torch.rand(4, 6, generator=g, dtype=torch.float64) - 0.5
    old_BT = logp_BT + spread * torch.randn(4, 6, generator=g, dtype=torch.float64)
    advantages_BT = torch.randn(4, 6, generator=g, dtype=torch.float64)
    mask_BT = torch.rand(4, 6, generator=g) < 0.7
    mask_BT[3] = False
    return LossInputs(
        logp_BT.to(dtype).requires_grad_(),
        old_BT.to(dtype),
        advantages_BT.to(dtype),
        mask_BT,
        options=options,
    )


def gradient(function: Callable[[LossInputs], LossTerms], inputs: LossInputs) -> Tensor:
    (grad_BT,) = torch.autograd.grad(function(inputs).loss_per_token.sum(), inputs.logp)
    return grad_BT


@each_policy_loss
@given(seed=SEEDS)
@quick
def test_masked_garbage_reaches_no_loss_metric_or_gradient(name: str, seed: int) -> None:
    function, options = POLICY_LOSSES[name]
    clean = loss_inputs(seed, options)
    garbage_BT = torch.tensor([math.nan, math.inf, -math.inf])[torch.arange(24) % 3].view(4, 6)

    def dirty(x_BT: Tensor) -> Tensor:
        return torch.where(clean.mask, x_BT.detach(), garbage_BT)

    soiled = LossInputs(
        dirty(clean.logp).requires_grad_(),
        dirty(clean.old_logp),
        dirty(clean.advantages),
        clean.mask.to(torch.int64),
        options=options,
    )
    expected, got = function(clean), function(soiled)
    assert torch.equal(got.loss_per_token, expected.loss_per_token)
    assert not got.loss_per_token[~clean.mask].any()
    assert got.metrics.keys() == expected.metrics.keys() >= {"clip_frac", "ppo_kl"}
    for key, metric_BT in got.metrics.items():
        assert torch.equal(metric_BT, expected.metrics[key]), key
        assert not metric_BT[~clean.mask].any(), key
        assert not metric_BT.requires_grad, key
    assert torch.equal(gradient(function, soiled), gradient(function, clean))


@each_policy_loss
def test_an_all_masked_batch_gives_no_loss_and_no_gradient(name: str) -> None:
    function, options = POLICY_LOSSES[name]
    logp_BT = torch.full((2, 3), math.nan, requires_grad=True)
    mask_BT = torch.zeros(2, 3, dtype=torch.bool)
    terms = function(LossInputs(logp_BT, logp_BT.detach(), logp_BT.detach(), mask_BT, options=options))
    for mode in ("sample", "token"):
        loss = aggregate(terms.loss_per_token, mask_BT, mode=mode, denominator=1.0)
        (grad_BT,) = torch.autograd.grad(loss, logp_BT, retain_graph=True)
        assert loss == 0
        assert not grad_BT.any()


@each_policy_loss
def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient(name: str) -> None:
    function, options = POLICY_LOSSES[name]
    inputs = loss_inputs(7, options, spread=0.0)
    if name == "gspo":
        # The ratio of the sequence spreads every token's gradient: only their sum is the plain one.
        inputs = LossInputs(
            inputs.logp,
            inputs.old_logp,
            inputs.advantages[:, :1].expand(4, 6),
            inputs.mask,
            options=options,
        )
    plain_BT = torch.where(inputs.mask, -inputs.advantages, torch.tensor(0.0))
    torch.testing.assert_close(gradient(function, inputs), plain_BT, rtol=1e-5, atol=1e-6)


@each_policy_loss
@given(seed=SEEDS)
@settings(max_examples=15, deadline=None)
def test_the_gradient_matches_finite_differences(name: str, seed: int) -> None:
    function, options = POLICY_LOSSES[name]
    inputs = loss_inputs(seed, options, dtype=torch.float64)
    step = 1e-6
    base = inputs.logp.detach()
    difference_BT = torch.zeros_like(base)
    for b, t in inputs.mask.nonzero().tolist():
        values = []
        for sign in (1, -1):
            moved_BT = base.clone()
            moved_BT[b, t] += sign * step
            values.append(surrogate_value(name, function, inputs, moved_BT))
        difference_BT[b, t] = (values[0] - values[1]) / (2 * step)
    torch.testing.assert_close(gradient(function, inputs), difference_BT, rtol=1e-5, atol=1e-6)


def surrogate_value(
    name: str, function: Callable[[LossInputs], LossTerms], inputs: LossInputs, logp_BT: Tensor
) -> Tensor:
    """The function whose derivative the loss's gradient must be."""
    if name.startswith("cispo"):
        # The weight is a constant: take it from the point itself, by dividing logp out of the loss.
        weight_BT = function(inputs).loss_per_token.detach() / inputs.logp.detach()
        return (weight_BT * logp_BT).sum()
    moved = LossInputs(logp_BT, inputs.old_logp, inputs.advantages, inputs.mask, options=inputs.options)
    return function(moved).loss_per_token.sum()


@each_policy_loss
def test_losses_are_float32_for_half_precision_inputs(name: str) -> None:
    function, options = POLICY_LOSSES[name]
    inputs = loss_inputs(3, options, dtype=torch.bfloat16)
    exact = LossInputs(
        inputs.logp.detach().float(),
        inputs.old_logp.float(),
        inputs.advantages.float(),
        inputs.mask,
        options=options,
    )
    got_BT = function(inputs).loss_per_token
    assert got_BT.dtype == torch.float32
    assert torch.equal(got_BT, function(exact).loss_per_token)


def test_clip_frac_does_not_count_a_tie() -> None:
    inputs = loss_inputs(5, relax_ppo.PpoOptions(), spread=0.0)
    assert not relax_ppo.policy_loss(inputs).metrics["clip_frac"].any()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.8, -1.2]),
        ({"cispo_two_sided": True}, [0.8, -1.2]),
        ({"cispo_by_sign": True, "cispo_two_sided": True}, [0.8, -1.2]),
        ({"cispo_by_sign": True}, [0.5, -4.0]),
        ({"eps_clip": 1.0}, [0.5, -2.0]),
        ({"eps_clip": 5.0, "eps_clip_high": 0.2}, [0.5, -1.2]),
    ],
)
def test_cispo_clips_both_sides_unless_told_otherwise(options: dict[str, Any], expected: list[float]) -> None:
    logp_BT = torch.tensor([[-1.0, -1.0]])
    inputs = LossInputs(
        logp_BT,
        logp_BT - torch.log(torch.tensor([[0.5, 4.0]])),
        torch.tensor([[1.0, -1.0]]),
        torch.tensor([[True, True]]),
        options=relax_cispo.CispoOptions(**options),
    )
    torch.testing.assert_close(
        relax_cispo.policy_loss(inputs).loss_per_token, torch.tensor([expected]), rtol=1e-6, atol=0
    )


def test_masked_garbage_never_reaches_the_value_loss() -> None:
    mask_BT = torch.tensor([[True, False]])
    values_BT = torch.tensor([[0.5, math.nan]], requires_grad=True)
    other_BT = torch.tensor([[0.0, math.inf]])
    terms = clipped_value_loss(values_BT, other_BT, other_BT, value_clip=1.0, mask=mask_BT)
    (grad_BT,) = torch.autograd.grad(terms.loss_per_token.sum(), values_BT)
    assert terms.loss_per_token.tolist() == [[0.25, 0.0]]
    assert grad_BT.tolist() == [[1.0, 0.0]]
    assert terms.metrics["value_clip_frac"].tolist() == [[0.0, 0.0]]


def test_the_value_loss_gradient_is_that_of_the_larger_square() -> None:
    values_BT = torch.tensor([[1.0, 0.2]], requires_grad=True)
    old_BT, returns_BT = torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 1.0]])
    terms = clipped_value_loss(values_BT, old_BT, returns_BT, value_clip=0.2)
    (grad_BT,) = torch.autograd.grad(terms.loss_per_token.sum(), values_BT)
    # Left the clipped square wins, and the clipped value does not move; right it is 2 (v - R).
    torch.testing.assert_close(grad_BT, torch.tensor([[0.0, -1.6]]))


# -- KL, importance weights ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_kl_gradients_match_float64_finite_differences(kind: str) -> None:
    logp_BT = torch.tensor([[-1.0, -2.0, -0.3]], dtype=torch.float64, requires_grad=True)
    ref_BT = torch.tensor([[-1.2, -1.0, -0.3]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref_BT, kind), (logp_BT,))


def test_low_var_kl_stays_finite_where_exp_overflows() -> None:
    logp_BT = torch.tensor([[-200.0, 50.0]], requires_grad=True)
    kl_BT = kl_estimate(logp_BT, torch.zeros(1, 2), "low_var_kl")
    (grad_BT,) = torch.autograd.grad(kl_BT.sum(), logp_BT)
    assert kl_BT.tolist() == [[10.0, 10.0]]
    assert grad_BT.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("log_ratio", [-1e4, -200.0, -89.0, 89.0, 200.0, 1e4])
def test_kl_and_its_gradient_are_finite_at_any_log_ratio(kind: str, log_ratio: float) -> None:
    logp_BT = torch.full((1, 1), log_ratio).requires_grad_()
    kl_BT = kl_estimate(logp_BT, torch.zeros(1, 1), kind)
    (grad_BT,) = torch.autograd.grad(kl_BT.sum(), logp_BT)
    assert kl_BT.isfinite().all()
    assert grad_BT.isfinite().all()
    assert kind == "k1" or kl_BT.item() > 0


def test_an_unknown_kl_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'k4'.*k1, k2, k3 or low_var_kl"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), "k4")


def test_tis_weights_are_truncated_and_detached() -> None:
    train_BT = torch.log(torch.tensor([[0.5, 0.9, 0.1]])).requires_grad_()
    rollout_BT = torch.log(torch.tensor([[0.1, 0.6, 0.8]]))
    weight_BT = tis_weight(train_BT, rollout_BT, low=0.5, high=2.0)
    torch.testing.assert_close(weight_BT, torch.tensor([[2.0, 1.5, 0.5]]))
    assert not weight_BT.requires_grad


# -- group advantages, reduction -------------------------------------------------------------------


@quick
@given(seed=SEEDS, reward=st.floats(-1e6, 1e6, width=32), size=st.integers(1, 17))
def test_equal_rewards_give_exactly_zero(seed: int, reward: float, size: int) -> None:
    order = torch.randperm(2 * size, generator=rng(seed))
    rewards_B = torch.cat((torch.full((size,), reward), torch.full((size,), -3.0)))[order]
    groups_B = torch.cat((torch.full((size,), 5), torch.full((size,), -7)))[order]
    on_B = torch.ones(2 * size, dtype=torch.bool)
    assert not group_advantages(rewards_B, groups_B, trainable=on_B, use_std=True).any()


@quick
@given(seed=SEEDS)
def test_groups_never_mix_and_untrainable_samples_are_out(seed: int) -> None:
    g = rng(seed)
    rewards_B = torch.randn(12, generator=g)
    groups_B = torch.randint(0, 3, (12,), generator=g)
    on_B = torch.rand(12, generator=g) < 0.8
    rewards_B[~on_B] = math.nan
    got_B = group_advantages(rewards_B, groups_B, trainable=on_B, use_std=True)
    assert not got_B[~on_B].any()
    for group in groups_B.unique():
        member_B = (groups_B == group) & on_B
        x = rewards_B[member_B].double()
        if len(x) < 2:
            assert not got_B[member_B].any()
        else:
            expected = ((x - x.mean()) / (x.std() + 1e-6)).float()
            torch.testing.assert_close(got_B[member_B], expected, rtol=1e-5, atol=1e-6)


def test_group_advantages_reach_trainable_tokens_and_pay_for_kl() -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0]),
        mask=torch.tensor([[True, False, True], [False, True, True]]),
        group_ids=torch.tensor([4, 4]),
        options=relax_gspo.GspoOptions(disable_grpo_std_normalization=True),
        kl=torch.tensor([[0.2, math.nan, 0.2], [math.nan, 0.0, 0.0]]),
    )
    got_BT = group_token_advantages(inputs).advantages
    torch.testing.assert_close(got_BT, torch.tensor([[0.3, 0.0, 0.3], [0.0, -0.3, -0.3]]))


@quick
@given(seed=SEEDS, size=st.integers(1, 8), mode=st.sampled_from(["sample", "token"]))
def test_the_loss_ignores_micro_batches_padding_and_row_order(seed: int, size: int, mode: Any) -> None:
    g = rng(seed)
    loss_BT = torch.randn(8, 9, generator=g)
    mask_BT = torch.rand(8, 9, generator=g) < 0.6
    denominator = 8.0 if mode == "sample" else float(mask_BT.sum())
    whole = aggregate(loss_BT, mask_BT, mode=mode, denominator=denominator)
    garbage_BT = torch.where(mask_BT, loss_BT, torch.tensor(math.nan))
    wide_BT = torch.nn.functional.pad(garbage_BT, (0, 4), value=math.inf)
    wide_mask_BT = torch.nn.functional.pad(mask_BT, (0, 4))
    order = torch.randperm(8, generator=g)
    shares = [
        aggregate(wide_BT[rows], wide_mask_BT[rows], mode=mode, denominator=torch.tensor(denominator))
        for rows in order.split(size)
    ]
    torch.testing.assert_close(torch.stack(shares).sum(), whole, rtol=1e-6, atol=1e-7)


# -- whitening over ranks --------------------------------------------------------------------------


def test_whitening_keeps_its_digits_when_the_mean_is_large() -> None:
    x_BT = torch.tensor([[4096.0, 4096.5, 4097.0, math.nan]])
    got_BT = whiten(x_BT, torch.tensor([[1, 1, 1, 0]]))
    torch.testing.assert_close(got_BT, torch.tensor([[-1.0, 0.0, 1.0, 0.0]]), rtol=0, atol=1e-6)


def whiten_on_a_rank(rank: int, folder: str, shards: list[list[list[float]]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=len(shards))
    results = []
    for step in range(len(shards[0])):
        x_BT = torch.tensor(shards[rank][step]).view(1, -1)
        results.append(whiten(x_BT, torch.ones_like(x_BT), group=dist.group.WORLD).view(-1).tolist())
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def test_whitening_over_two_ranks_equals_whitening_of_the_union(tmp_path: Path) -> None:
    """Three calls in a row: both ranks have tokens, one has none, and the union is a single token."""
    shards = [[[1.0, 2.0], [], [3.0]], [[5.0, 9.0, 3.0], [4.0, 6.0, 8.0], []]]
    torch.multiprocessing.spawn(whiten_on_a_rank, (str(tmp_path), shards), nprocs=2)
    got = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for step in range(3):
        union_BT = torch.tensor(shards[0][step] + shards[1][step])[None]
        expected = whiten(union_BT, torch.ones_like(union_BT))[0]
        torch.testing.assert_close(torch.tensor(got[0][step] + got[1][step]), expected, rtol=0, atol=1e-6)
    assert got[0][2] == [3.0]
