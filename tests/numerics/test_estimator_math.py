"""What each estimator must do: equal scalar arithmetic, its derivatives, its limits, its groups."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from relax_cli import AdvantageInputs, LossInputs
from relax_cli.algorithms.reduce import aggregate
from relax_cli.config.schema import RewardSection
from relax_cli.data.rewards import RewardInput, load_reward
from relax_cli.errors import RunError
from tests.support.estimators import (
    LENGTH,
    ROWS,
    SEEDS,
    Variant,
    every_mode,
    every_variant,
    few,
    random_inputs,
    row_loss,
    scalar_loss,
    some,
)


def at_ratio(ratio: float, advantage: float, options: Any, dtype: torch.dtype = torch.float32) -> LossInputs:
    """One token of that ratio."""
    return at_log_ratio(math.log(ratio), advantage, options, dtype)


def at_log_ratio(log_ratio: float, advantage: float, options: Any, dtype: torch.dtype = torch.float32) -> LossInputs:
    logp_BT = torch.full((1, 1), -0.75, dtype=dtype, requires_grad=True)
    return LossInputs(
        logp_BT,
        logp_BT.detach() - log_ratio,
        torch.full_like(logp_BT, advantage).detach(),
        logp_BT.isfinite(),
        options=options,
    )


def loss_and_slope(variant: Variant, inputs: LossInputs) -> tuple[float, float]:
    """Loss of a single token and its derivative by logp."""
    loss_BT = variant.estimator.load_policy_loss()(inputs).loss_per_token
    (grad_BT,) = torch.autograd.grad(loss_BT.sum(), inputs.logp)
    return loss_BT.item(), grad_BT.item()


# -- every estimator -------------------------------------------------------------------------------


@every_mode
@every_variant
@given(seed=SEEDS)
@some
def test_the_reduced_loss_is_that_of_scalar_arithmetic(variant: str, mode: str, seed: int) -> None:
    one = Variant.of(variant)
    inputs = random_inputs(seed, one.options)
    total = 0.0
    for b in range(ROWS):
        on_T = inputs.mask[b]
        logps, olds, advantages = (x[b][on_T].tolist() for x in (inputs.logp, inputs.old_logp, inputs.advantages))
        diffs = [new - old for new, old in zip(logps, olds, strict=True)]
        row = row_loss(variant, one.options, diffs, logps, advantages)
        total += row / max(len(logps), 1) if mode == "sample" else row
    expected = total / (ROWS if mode == "sample" else int(inputs.mask.sum()))
    assert scalar_loss(one, inputs, mode).item() == pytest.approx(expected, rel=1e-12, abs=1e-14)


@every_mode
@every_variant
@given(seed=SEEDS)
@few
def test_the_gradient_of_the_loss_matches_finite_differences(variant: str, mode: str, seed: int) -> None:
    one, step = Variant.of(variant), 1e-6
    inputs = random_inputs(seed, one.options)
    (grad_BT,) = torch.autograd.grad(scalar_loss(one, inputs, mode), inputs.logp)
    assert not grad_BT[~inputs.mask].any()
    for b, t in inputs.mask.nonzero().tolist():
        around = []
        for sign in (1, -1):
            moved_BT = inputs.logp.detach().clone()
            moved_BT[b, t] += sign * step
            around.append(differentiable_value(variant, one, inputs, moved_BT, mode))
        assert grad_BT[b, t].item() == pytest.approx((around[0] - around[1]) / (2 * step), rel=1e-5, abs=1e-7)


def differentiable_value(name: str, variant: Variant, inputs: LossInputs, logp_BT: Tensor, mode: str) -> float:
    """The function whose derivative the gradient is; CISPO's weight is a constant of the point itself."""
    if not name.startswith("cispo"):
        return scalar_loss(variant, replace(inputs, logp=logp_BT), mode).item()
    loss_BT = variant.estimator.load_policy_loss()(inputs).loss_per_token.detach()
    moved_BT = loss_BT / torch.where(inputs.mask, inputs.logp.detach(), 1.0) * torch.where(inputs.mask, logp_BT, 0.0)
    denominator = float(ROWS if mode == "sample" else inputs.mask.sum())
    return aggregate(moved_BT, inputs.mask, mode=mode, denominator=denominator).item()  # type: ignore[arg-type]


@every_mode
@every_variant
@given(seed=SEEDS)
@few
def test_at_ratio_one_the_gradient_is_that_of_reinforce(variant: str, mode: str, seed: int) -> None:
    one = Variant.of(variant)
    inputs = random_inputs(seed, one.options, spread=0.0, dtype=torch.float32)
    # One advantage for the whole response, as every group estimator has it; GSPO's sequence ratio needs it.
    filled_BT = torch.where(inputs.mask, inputs.advantages, 0.0).sum(1, keepdim=True).expand(ROWS, LENGTH)
    inputs = replace(inputs, advantages=filled_BT)
    terms = one.estimator.load_policy_loss()(inputs)
    assert not terms.metrics["clip_frac"].any()
    assert not terms.metrics["ppo_kl"].any()
    (grad_BT,) = torch.autograd.grad(scalar_loss(one, inputs, mode), inputs.logp)
    reinforce_BT = torch.where(inputs.mask, -filled_BT * inputs.logp, 0.0)
    denominator = float(ROWS if mode == "sample" else inputs.mask.sum())
    plain = aggregate(reinforce_BT, inputs.mask, mode=mode, denominator=denominator)  # type: ignore[arg-type]
    (expected_BT,) = torch.autograd.grad(plain, inputs.logp)
    expected_BT = torch.where(inputs.mask, expected_BT, 0.0)
    torch.testing.assert_close(grad_BT, expected_BT, rtol=1e-5, atol=1e-7)


@every_mode
@every_variant
def test_an_all_masked_batch_gives_loss_zero_and_gradient_zero(variant: str, mode: str) -> None:
    one = Variant.of(variant)
    inputs = random_inputs(0, one.options, dtype=torch.float32)
    inputs = replace(inputs, mask=torch.zeros_like(inputs.mask))
    terms = one.estimator.load_policy_loss()(inputs)
    loss = aggregate(terms.loss_per_token, inputs.mask, mode=mode, denominator=1.0)  # type: ignore[arg-type]
    (grad_BT,) = torch.autograd.grad(loss, inputs.logp)
    assert loss.item() == 0.0
    assert not grad_BT.any()
    assert not any(metric_BT.any() for metric_BT in terms.metrics.values())


@every_variant
def test_advantages_of_an_all_masked_batch_are_zero(variant: str) -> None:
    one = Variant.of(variant)
    nothing_BT = torch.full((4, 3), math.nan)
    outputs = one.estimator.load_advantages()(
        AdvantageInputs(
            rewards=torch.full((4,), math.nan),
            mask=torch.zeros(4, 3, dtype=torch.bool),
            group_ids=torch.tensor([0, 0, 1, 1]),
            options=one.options,
            values=nothing_BT,
        )
    )
    assert not outputs.advantages.any()
    assert outputs.returns is None or not outputs.returns.any()


# -- SAPO, CISPO, GSPO and PPO in their limits -----------------------------------------------------


@pytest.mark.parametrize("advantage", [1.5, -0.7])
@pytest.mark.parametrize("ratio", [0.05, 0.5, 1.0, 2.0, 9.0])
def test_sapo_without_temperature_is_the_unclipped_surrogate(ratio: float, advantage: float) -> None:
    cold = Variant.of("sapo", sapo_tau_pos=1e-6, sapo_tau_neg=1e-6)
    _, slope = loss_and_slope(cold, at_ratio(ratio, advantage, cold.options, torch.float64))
    assert slope == pytest.approx(-ratio * advantage, rel=1e-5)


@pytest.mark.parametrize("advantage", [1.5, -0.7])
@pytest.mark.parametrize("log_ratio", [5.0, 30.0, 87.0, 95.0, 1e4])
def test_sapo_saturates_for_large_ratios_without_overflow(log_ratio: float, advantage: float) -> None:
    sapo = Variant.of("sapo")
    tau = 1.0 if advantage > 0 else 1.05
    loss, slope = loss_and_slope(sapo, at_log_ratio(log_ratio, advantage, sapo.options))
    assert loss == pytest.approx(-4 / tau * advantage, rel=1e-6)
    assert slope == 0.0


@pytest.mark.parametrize("advantage", [1.5, -0.7])
def test_sapo_lets_go_of_tokens_that_vanished(advantage: float) -> None:
    sapo = Variant.of("sapo")
    tau = 1.0 if advantage > 0 else 1.05
    loss, slope = loss_and_slope(sapo, at_log_ratio(-40.0, advantage, sapo.options))
    assert loss == pytest.approx(-4 / tau / (1 + math.exp(tau)) * advantage, rel=1e-6)
    assert abs(slope) < 1e-15


def test_sapo_picks_its_temperature_by_the_sign_of_the_advantage() -> None:
    sapo = Variant.of("sapo", sapo_tau_pos=0.5, sapo_tau_neg=3.0)
    slopes = {a: loss_and_slope(sapo, at_ratio(1.5, a, sapo.options))[1] for a in (1.0, -1.0)}
    for advantage, tau in ((1.0, 0.5), (-1.0, 3.0)):
        gate = 1 / (1 + math.exp(-tau * 0.5))
        assert slopes[advantage] == pytest.approx(-4 * gate * (1 - gate) * 1.5 * advantage, rel=1e-5)


@pytest.mark.parametrize("advantage", [1.5, -0.7])
@pytest.mark.parametrize("ratio", [1e-3, 0.3, 1.0, 4.0, 1e3])
def test_cispo_without_clipping_is_importance_weighted_reinforce(ratio: float, advantage: float) -> None:
    for by_sign in (False, True):
        loose = Variant.of("cispo", eps_clip=1 - 1e-9, eps_clip_high=1e9, cispo_by_sign=by_sign)
        _, slope = loss_and_slope(loose, at_ratio(ratio, advantage, loose.options, torch.float64))
        assert slope == pytest.approx(-ratio * advantage, rel=1e-6)


@pytest.mark.parametrize("advantage", [1.5, -0.7])
@pytest.mark.parametrize("ratio", [1e-3, 0.3, 1.0, 4.0, 1e3])
def test_cispo_clipped_to_nothing_is_reinforce(ratio: float, advantage: float) -> None:
    tight = Variant.of("cispo", eps_clip=1e-9)
    _, slope = loss_and_slope(tight, at_ratio(ratio, advantage, tight.options, torch.float64))
    assert slope == pytest.approx(-advantage, rel=1e-6)


@pytest.mark.parametrize(("ratio", "advantage"), [(30.0, 1.5), (0.01, -0.7)])
def test_cispo_keeps_the_gradient_that_ppo_drops(ratio: float, advantage: float) -> None:
    cispo, ppo = Variant.of("cispo"), Variant.of("ppo")
    assert loss_and_slope(ppo, at_ratio(ratio, advantage, ppo.options))[1] == 0.0
    bound = 1.2 if advantage > 0 else 0.8
    assert loss_and_slope(cispo, at_ratio(ratio, advantage, cispo.options))[1] == pytest.approx(-bound * advantage)


@pytest.mark.parametrize(
    ("variant", "advantage"), [("ppo", 1.5), ("ppo dual-clip", -0.7), ("grpo", 0.0), ("gspo", 2.0)]
)
@pytest.mark.parametrize("log_ratio", [20.0, 95.0, 1e4])
def test_a_bounded_loss_stays_finite_where_the_ratio_overflows(
    variant: str, advantage: float, log_ratio: float
) -> None:
    one = Variant.of(variant)
    loss, slope = loss_and_slope(one, at_log_ratio(log_ratio, advantage, one.options))
    bound = 1.5 if variant == "ppo dual-clip" else 1.2
    assert loss == pytest.approx(-bound * advantage, rel=1e-6)
    assert slope == 0.0


@every_variant
@pytest.mark.parametrize("advantage", [-1e5, -0.7, 0.0, 1e5])
@pytest.mark.parametrize("log_ratio", [-math.inf, -1e4, -100.0, 80.0, 89.0, 100.0, 1e4, math.inf])
def test_losses_and_gradients_are_finite_at_any_log_ratio(variant: str, advantage: float, log_ratio: float) -> None:
    one = Variant.of(variant)
    logp_BT = torch.tensor([[-2.5]]).requires_grad_()
    old_BT = torch.tensor([[-2.5 - log_ratio]])
    inputs = LossInputs(logp_BT, old_BT, torch.tensor([[advantage]]), torch.tensor([[True]]), options=one.options)
    loss_BT = one.estimator.load_policy_loss()(inputs).loss_per_token
    (grad_BT,) = torch.autograd.grad(loss_BT.sum(), logp_BT)
    assert loss_BT.isfinite().all()
    assert grad_BT.isfinite().all()


@pytest.mark.parametrize("variant", ["ppo", "grpo", "gspo"])
@pytest.mark.parametrize("log_ratio", [1.0, 30.0, 79.0])
def test_a_negative_advantage_is_unbounded_below_the_cap(variant: str, log_ratio: float) -> None:
    one = Variant.of(variant)
    loss, slope = loss_and_slope(one, at_log_ratio(log_ratio, -0.7, one.options))
    assert loss == pytest.approx(0.7 * math.exp(log_ratio), rel=1e-4)
    assert slope == pytest.approx(0.7 * math.exp(log_ratio), rel=1e-4)


def test_gspo_of_single_tokens_is_grpo() -> None:
    gspo, grpo = Variant.of("gspo"), Variant.of("grpo")
    for ratio in (0.5, 0.9, 1.0, 1.15, 3.0):
        for advantage in (1.0, -1.0):
            ours = loss_and_slope(gspo, at_ratio(ratio, advantage, gspo.options))
            assert ours == loss_and_slope(grpo, at_ratio(ratio, advantage, grpo.options))


def test_gspo_judges_a_response_as_a_whole() -> None:
    """Two tokens far outside the clip range that cancel each other are not clipped, and share one gradient."""
    gspo = Variant.of("gspo")
    logp_BT = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    inputs = LossInputs(
        logp_BT,
        torch.tensor([[-1.9, -0.1]]),
        torch.ones(1, 2),
        torch.ones(1, 2, dtype=torch.bool),
        options=gspo.options,
    )
    terms = gspo.estimator.load_policy_loss()(inputs)
    (grad_BT,) = torch.autograd.grad(terms.loss_per_token.sum(), logp_BT)
    torch.testing.assert_close(terms.loss_per_token, torch.tensor([[-1.0, -1.0]]))
    torch.testing.assert_close(grad_BT, torch.tensor([[-1.0, -1.0]]))
    assert not terms.metrics["clip_frac"].any()


# -- groups and rewards ----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["grpo", "grpo no-std", "gspo", "cispo", "sapo"])
@given(seed=SEEDS)
@some
def test_a_group_sees_only_its_own_trainable_samples(variant: str, seed: int) -> None:
    one = Variant.of(variant)
    g = torch.Generator().manual_seed(seed)
    rewards_B = torch.randn(12, generator=g)
    groups_B = torch.tensor([9, -4, 9, 700, -4, 9, 700, 9, -4, 700, 700, 9])
    mask_BT = torch.rand(12, 5, generator=g) < 0.6
    mask_BT[[0, 4]] = False

    def advantages_of(rows: list[int], rewards: Tensor) -> Tensor:
        inputs = AdvantageInputs(rewards[rows], mask_BT[rows], groups_B[rows], one.options)
        return one.estimator.load_advantages()(inputs).advantages

    together_BT = advantages_of(list(range(12)), torch.where(mask_BT.any(1), rewards_B, math.nan))
    assert not together_BT[~mask_BT].any()
    for group in (9, -4, 700):
        rows = [b for b in range(12) if groups_B[b] == group and mask_BT[b].any()]
        assert torch.equal(together_BT[rows], advantages_of(rows, rewards_B))
        assert torch.equal(advantages_of(rows[::-1], rewards_B).flip(0), together_BT[rows])
        x = rewards_B[rows].double()
        expected_B = x - x.mean()
        if variant != "grpo no-std" and len(rows) > 1:
            expected_B = expected_B / (x.std() + 1e-6)
        got_B = together_BT[rows].sum(1) / mask_BT[rows].sum(1)
        torch.testing.assert_close(got_B.double(), expected_B, rtol=1e-5, atol=1e-6)


def broken_reward(samples: list[RewardInput]) -> list[float]:
    """NaN for the response `bad`."""
    return [math.nan if sample.response == "bad" else 1.0 for sample in samples]


def test_a_nan_of_a_named_reward_is_refused_with_its_sample() -> None:
    reward = load_reward(RewardSection(rm_type="broken"), {"broken": f"{__name__}:broken_reward"})
    samples = [RewardInput("What?", text, None, {}, truncated=False, group=7) for text in ("fine", "bad")]
    with pytest.raises(RunError) as caught:
        reward(samples)
    (problem,) = caught.value.problems
    assert "group 7" in problem.where
    assert "'bad'" in problem.where
    assert problem.got == "nan"
    assert [result.reward for result in reward(samples[:1])] == [1.0]
