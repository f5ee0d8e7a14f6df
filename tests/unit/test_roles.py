"""The pure parts of roles and schedule."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from relax_cli.algorithms.gae import gae
from relax_cli.backends.megatron import parallel
from relax_cli.config.schema import AlgorithmSection, BatchSection, Config, CriticSection
from relax_cli.config.section import GaeOptions, GroupOptions
from relax_cli.errors import RunError
from relax_cli.plugin.graph import RoleSpec, base_graph, completed
from relax_cli.plugin.manager import load_plugins
from relax_cli.plugin.records import EstimatorMath
from relax_cli.preflight.plan import optimizer_steps
from relax_cli.roles.actor import check_gap, policy_loss_per_token
from relax_cli.roles.advantages import advantage_inputs, finished_advantages, kl_penalty
from relax_cli.roles.batching import Columns
from relax_cli.roles.critic import explained_variance, with_end_state
from relax_cli.roles.rollout import EVAL_STREAM, sample_seed
from relax_cli.roles.training import RolloutShare, summarise

LENGTHS = (3, 1, 5, 2, 4, 130, 129)


def columns(*optional: str) -> Columns:
    """Seven responses of different lengths, one with a hole in its mask, one with no trainable token."""
    generator = torch.Generator().manual_seed(5)

    def per_token() -> dict[int, torch.Tensor]:
        return {row: torch.randn(length, generator=generator) for row, length in enumerate(LENGTHS)}

    masks = {row: torch.ones(length, dtype=torch.int64) for row, length in enumerate(LENGTHS)}
    masks[2][1:3] = 0
    masks[3][:] = 0
    found: Columns = {
        "response_lens": {row: torch.tensor(length) for row, length in enumerate(LENGTHS)},
        "response_mask": masks,
        "rewards": {row: torch.tensor(float(row % 3)) for row in range(len(LENGTHS))},
        "group_ids": {row: torch.tensor(row // 2) for row in range(len(LENGTHS))},
        "truncated": {row: torch.tensor(row % 2) for row in range(len(LENGTHS))},
    }
    for name in optional:
        found[name] = {row: x[0] for row, x in per_token().items()} if name == "bootstrap_values" else per_token()
    return found


def ppo_options(**changes: Any) -> Any:
    estimator = load_plugins().estimator("ppo")
    return estimator.options(**changes)


# -- advantages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"gamma": 0.99, "lambd": 0.95},
        {"gamma": 0.99, "lambd": 0.95, "critic_lambd": 1.0},
        {"gamma": 0.99, "lambd": 0.95, "critic_lambd": 0.9, "length_adaptive_lambd_alpha": 0.4},
    ],
)
@pytest.mark.parametrize("optional", [(), ("bootstrap_values", "kl")])
def test_a_rank_gets_the_returns_of_the_service_bitwise(changes: dict[str, float], optional: tuple[str, ...]) -> None:
    advantages = load_plugins().estimator("ppo").load_advantages()
    data, options = columns("values", *optional), ppo_options(**changes)
    everything = advantages(advantage_inputs(data, range(len(LENGTHS)), options))
    for rows in ([0, 1, 4], [5], [6, 2], [3]):
        part = advantages(advantage_inputs(data, rows, options))
        for i, row in enumerate(rows):
            for whole, own in ((everything.returns, part.returns), (everything.advantages, part.advantages)):
                assert whole is not None
                assert own is not None
                assert torch.equal(whole[row, : LENGTHS[row]], own[i, : LENGTHS[row]])


def test_policy_and_value_targets_may_use_different_lambdas() -> None:
    advantages = load_plugins().estimator("ppo").load_advantages()
    data = columns("values")

    def outputs(**changes: float) -> Any:
        return advantages(advantage_inputs(data, range(len(LENGTHS)), ppo_options(gamma=0.9, **changes)))

    both, low, high = outputs(lambd=0.5, critic_lambd=0.95), outputs(lambd=0.5), outputs(lambd=0.95)
    assert torch.equal(both.advantages, low.advantages)
    assert torch.equal(both.returns, high.returns)
    assert not torch.equal(low.returns, high.returns)


def test_the_length_adaptive_lambda_follows_its_formula() -> None:
    from relax_ppo.advantages import length_adaptive_lambda

    mask = torch.zeros(4, 200, dtype=torch.bool)
    mask[0, :20], mask[1, 5:105], mask[2, :2] = True, True, True
    found = length_adaptive_lambda(mask, 0.05)
    assert found.tolist() == pytest.approx([0.0, 0.8, 0.0, 0.0])
    advantages = load_plugins().estimator("ppo").load_advantages()
    data = columns("values")
    adaptive = advantages(advantage_inputs(data, [5], ppo_options(lambd=0.3, length_adaptive_lambd_alpha=0.1)))
    fixed = advantages(advantage_inputs(data, [5], ppo_options(lambd=1 - 1 / 13)))
    assert torch.allclose(adaptive.advantages, fixed.advantages, atol=1e-6)
    assert adaptive.returns is not None
    plain = advantages(advantage_inputs(data, [5], ppo_options(lambd=0.3))).returns
    assert torch.equal(adaptive.returns, plain)


@pytest.mark.parametrize("holes", [False, True])
def test_gae_with_a_lambda_per_row_equals_each_row_bitwise(holes: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    rewards, values = torch.randn(2, 150, 300, generator=generator)
    lengths = torch.randint(0, 301, (150, 1), generator=generator)
    mask = torch.rand(150, 300, generator=generator) < 0.6 if holes else torch.arange(300) < lengths
    lambdas = torch.rand(150, generator=generator, dtype=torch.float64)
    advantages, returns = gae(rewards, values, mask, gamma=0.99, lam=lambdas)
    for row in range(0, 150, 7):
        one = slice(row, row + 1)
        alone = gae(rewards[one], values[one], mask[one], gamma=0.99, lam=float(lambdas[row]))
        assert torch.equal(advantages[one], alone[0])
        assert torch.equal(returns[one], alone[1])


def test_the_bootstrap_value_follows_the_last_trainable_token() -> None:
    advantages = load_plugins().estimator("ppo").load_advantages()
    data = columns("values", "bootstrap_values")
    found = advantages(advantage_inputs(data, [0, 2, 3], ppo_options(gamma=0.5, lambd=0.7)))
    assert found.returns is not None
    for i, row in ((0, 0), (1, 2)):
        last = float(data["rewards"][row]) + 0.5 * float(data["bootstrap_values"][row])
        assert float(found.returns[i, LENGTHS[row] - 1]) == pytest.approx(last, abs=1e-6)
    assert not found.returns[2].any()


def test_inputs_hold_only_what_there_is() -> None:
    inputs = advantage_inputs(columns(), [1, 4], GroupOptions())
    assert (inputs.values, inputs.kl, inputs.bootstrap) == (None, None, None)
    assert inputs.mask.tolist() == [[True, False, False, False], [True] * 4]
    assert inputs.truncated is not None
    assert inputs.truncated.tolist() == [True, False]
    with_kl = advantage_inputs(columns("kl"), [1, 4], GroupOptions())
    assert with_kl.kl is not None
    assert with_kl.kl.shape == (2, 4)


def test_the_kl_penalty_is_coefficient_times_old_minus_ref() -> None:
    data: Columns = {
        "old": {0: torch.tensor([-1.0, -2.0]), 7: torch.tensor([-0.5])},
        "ref_log_probs": {0: torch.tensor([-1.5, -1.0]), 7: torch.tensor([-0.5])},
    }
    found = kl_penalty(data, [0, 7], 0.2, old="old")
    assert found[0].tolist() == pytest.approx([0.1, -0.2])
    assert found[7].tolist() == [0.0]


def test_whitening_is_over_trainable_tokens_after_the_metrics() -> None:
    inputs = advantage_inputs(columns("kl"), range(len(LENGTHS)), GroupOptions())
    raw = torch.randn(inputs.mask.shape, generator=torch.Generator().manual_seed(1)) * 3 + 10
    white, metrics = finished_advantages(raw, inputs, normalize=True)
    kept, before = white[inputs.mask], raw[inputs.mask]
    assert (float(kept.mean()), float(kept.std())) == pytest.approx((0, 1), abs=1e-5)
    assert not white[~inputs.mask].any()
    assert metrics["advantages/mean"] == pytest.approx(float(before.mean()))
    assert metrics["advantages/std"] == pytest.approx(float(before.std()))
    assert inputs.kl is not None
    assert metrics["kl_penalty"] == pytest.approx(float(inputs.kl[inputs.mask].mean()))
    plain, _ = finished_advantages(raw, inputs, normalize=False)
    assert torch.equal(plain, raw)


def test_a_rollout_without_trainable_tokens_has_mean_advantage_0() -> None:
    inputs = advantage_inputs(columns(), [3], GroupOptions())
    white, metrics = finished_advantages(torch.zeros(inputs.mask.shape), inputs, normalize=True)
    assert metrics == {"advantages/mean": 0.0, "advantages/std": 0.0}
    assert not white.any()


# -- steps -----------------------------------------------------------------------------------------


def test_metrics_are_means_over_steps_with_skipped_ones_counted() -> None:
    records = [{"pg_loss": 1.0, "actor/skipped_steps": 1.0}, {"pg_loss": 4.0, "actor/skipped_steps": 1.0}]
    assert summarise(records) == {"pg_loss": 2.5, "actor/skipped_steps": 2.0}


@pytest.mark.parametrize(
    ("has_critic", "expected"), [(True, ((10 - 4) * 2, 10 * 2 * 3)), (False, (10 * 2, 10 * 2 * 3))]
)
def test_optimizer_steps_of_a_run(has_critic: bool, expected: tuple[int, int]) -> None:
    config = Config(
        batch=BatchSection(rollout_batch_size=8, num_steps_per_rollout=2),
        critic=CriticSection(num_critic_only_steps=4, critic_updates_per_step=3),
    )
    assert optimizer_steps(config, 10, has_critic=has_critic) == expected


def test_the_end_state_adds_a_token_outside_the_sample() -> None:
    data: Columns = {"tokens": {0: torch.tensor([5, 6, 7])}, "response_lens": {0: torch.tensor(2)}, "rewards": {}}
    longer = with_end_state(data)
    assert longer["tokens"][0].tolist()[:3] == [5, 6, 7]
    assert longer["tokens"][0].numel() == 4
    assert int(longer["response_lens"][0]) == 3
    assert data["tokens"][0].numel() == 3


def test_explained_variance_is_that_of_the_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "all_reduce", list)
    returns, values = torch.tensor([1.0, 2.0, 4.0, 9.0]), torch.tensor([3.0, 3.0, 7.0, 5.0])
    columns = {"returns": {0: returns}, "values": {0: values}, "response_mask": {0: torch.tensor([1, 1, 1, 0])}}
    found = explained_variance(RolloutShare(0, columns, [[0]], [3.0]))
    trained, residuals = returns[:3], (returns - values)[:3]
    assert found["explained_variance"] == pytest.approx(float(1 - residuals.var() / trained.var()), abs=1e-6)
    assert found["values/mean"] == pytest.approx(13 / 3)
    assert found["returns/mean"] == pytest.approx(7 / 3)


@pytest.mark.parametrize(("ratio", "weight"), [(0.25, 0.5), (0.75, 0.75), (3.0, 2.0)])
def test_tis_weights_stay_within_their_clips(ratio: float, weight: float) -> None:
    estimator = load_plugins().estimator("grpo")
    old, mask = torch.full((1, 2), -1.0), torch.tensor([[True, False]])
    fields = {"old_log_probs": old, "rollout_log_probs": old - math.log(ratio), "advantages": torch.ones(1, 2)}
    section = AlgorithmSection(use_tis=True, tis_clip_low=0.5, tis_clip=2.0)
    loss, watched = policy_loss_per_token(EstimatorMath(estimator), estimator.options(), section, old, fields, mask)
    assert watched["tis_weight"][0, 0] == pytest.approx(weight)
    assert loss.tolist() == [[pytest.approx(-weight), 0.0]]


# -- service graph ---------------------------------------------------------------------------------


def test_a_kl_term_adds_a_reference_and_its_field_to_readers() -> None:
    loss = completed(base_graph(), Config(algorithm=AlgorithmSection(use_kl_loss=True)))
    assert loss.names == ("rollout", "reference", "actor")
    assert loss["reference"].writes == ("ref_log_probs",)
    assert loss["reference"].uses_device
    assert "ref_log_probs" in loss["actor"].reads
    assert loss.problems() == []
    assert completed(base_graph(), Config()).names == ("rollout", "actor")


def test_a_kl_penalty_reaches_advantages_a_kl_loss_the_actor() -> None:
    critic = RoleSpec("critic", ("tokens",), ("values",), uses_device=True)
    service = RoleSpec("advantages", ("values",), ("advantages",), uses_device=False)
    graph = base_graph().with_role(critic).with_role(service)
    penalty = completed(graph, Config(algorithm=AlgorithmSection(kl_coef=0.1)))
    assert penalty.names == ("rollout", "reference", "critic", "advantages", "actor")
    for role in ("critic", "advantages"):
        assert {"rollout_log_probs", "ref_log_probs"} <= set(penalty[role].reads)
        assert "ref_log_probs" not in completed(graph, Config(algorithm=AlgorithmSection(use_kl_loss=True)))[role].reads
    assert penalty.problems() == []


def test_the_actor_writes_advantages_where_no_service_does() -> None:
    assert completed(base_graph(), Config())["actor"].writes == ("advantages",)
    service = RoleSpec("advantages", ("rewards",), ("advantages",), uses_device=False)
    assert completed(base_graph().with_role(service), Config())["actor"].writes == ()


def test_ppo_sends_bootstrap_values_only_when_enabled() -> None:
    plugins = load_plugins()

    def graph(bootstrap: bool) -> Any:
        section = AlgorithmSection(advantage_estimator="ppo", bootstrap_truncated=bootstrap)
        return plugins.service_graph(Config(algorithm=section))

    assert graph(True)["critic"].writes == ("values", "bootstrap_values")
    assert "bootstrap_values" in graph(True)["advantages"].reads
    assert graph(False)["critic"].writes == ("values",)
    assert "bootstrap_values" not in graph(False)["advantages"].reads


def test_lambdas_outside_their_range_are_refused() -> None:
    for name, value in (("critic_lambd", 1.1), ("length_adaptive_lambd_alpha", 0.0)):
        with pytest.raises(ValueError, match=name):
            GaeOptions(**{name: value})
    assert math.isclose(GaeOptions(critic_lambd=1.0).critic_lambd or 0, 1.0)


@pytest.mark.parametrize("mean", [0.0, 0.05, 1.0, math.nan])
def test_rounding_between_engine_and_trainer_is_accepted(mean: float) -> None:
    check_gap(mean, 3)


@pytest.mark.parametrize("mean", [1.01, 7.2, math.inf])
def test_an_engine_with_another_model_ends_the_run(mean: float) -> None:
    with pytest.raises(RunError, match="another model") as caught:
        check_gap(mean, 3)
    assert caught.value.problems[0].id == "logprob-gap"


def test_every_sample_has_noise_of_its_own() -> None:
    places = itertools.product((1, 2), (0, 1, EVAL_STREAM), range(4), ((), (0,), (1,)))
    seeds = [sample_seed(seed, rollout, row, *turn) for seed, rollout, row, turn in places]
    assert len(set(seeds)) == 2 * 3 * 4 * 3
    # A resumed run draws what the version that began it would have drawn.
    assert sample_seed(1, 2, 3) == 6498626229777268288
    assert sample_seed(1, 2, 3, 0) == 642920606058792133
