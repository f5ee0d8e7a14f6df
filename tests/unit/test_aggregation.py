"""What the loss is averaged over: the option, its old name, the estimator's own, and the denominators that follow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_cli.config.schema import AlgorithmSection, BatchSection, Config, RolloutSection
from relax_cli.errors import ConfigError
from relax_cli.plugin.config_model import config_model, estimator_options
from relax_cli.plugin.manager import load_plugins
from relax_cli.roles.context import RoleContext
from relax_cli.roles.training import RolloutShare, TrainingRole


@pytest.mark.parametrize(
    ("estimator", "options", "aggregation", "mode", "denominator"),
    [
        ("grpo", {}, "sample-mean", "sample", 8.0),
        ("gspo", {}, "sample-mean", "sample", 8.0),
        ("sapo", {}, "sample-mean", "sample", 8.0),
        ("ppo", {}, "sample-mean", "sample", 8.0),
        ("cispo", {}, "token-mean", "token", 37.0),
        ("cispo", {"loss_aggregation": "sample-mean"}, "sample-mean", "sample", 8.0),
        ("grpo", {"calculate_per_token_loss": True}, "token-mean", "token", 37.0),
        ("ppo", {"loss_aggregation": "token-mean"}, "token-mean", "token", 37.0),
        ("grpo", {"loss_aggregation": "constant"}, "constant", "token", 8.0 * 5),
        ("ppo", {"loss_aggregation": "constant", "calculate_per_token_loss": True}, "constant", "token", 8.0 * 5),
    ],
)
def test_the_denominator_follows_option_then_estimator(
    estimator: str, options: dict[str, Any], aggregation: str, mode: str, denominator: float
) -> None:
    config = Config(
        algorithm=AlgorithmSection(advantage_estimator=estimator, **options),
        batch=BatchSection(rollout_batch_size=16, num_steps_per_rollout=2),
        rollout=RolloutSection(rollout_max_response_len=5),
    )
    nothing: Any = SimpleNamespace()
    known = load_plugins().estimator(estimator)
    context = RoleContext(config, known, known.options(), nothing, nothing, Path(), 0, 1)
    model: Any = SimpleNamespace(packs=True)
    role = TrainingRole(model, context, save_dir=None)
    assert (role.aggregation, role.mode) == (aggregation, mode)
    assert role.loss_denominator(RolloutShare(0, {}, [[], []], [11.0, 37.0]), 1) == denominator


@pytest.mark.parametrize(("estimator", "accepted"), [("cispo", True), ("ppo", False), ("grpo", False), ("gspo", False)])
@pytest.mark.parametrize("eps_clip", [1.0, 4.0])
def test_only_cispo_takes_a_weight_without_lower_bound(estimator: str, accepted: bool, eps_clip: float) -> None:
    plugins = load_plugins()
    algorithm = {"advantage_estimator": estimator, "eps_clip": eps_clip}
    config = config_model(plugins.estimators().values()).model_validate({"algorithm": algorithm})
    known = plugins.estimator(estimator)
    if accepted:
        assert estimator_options(config, known).model_dump()["eps_clip"] == eps_clip
        return
    with pytest.raises(ConfigError) as caught:
        estimator_options(config, known)
    (problem,) = caught.value.problems
    assert (problem.id, problem.option) == ("estimator-option", "--eps-clip")
