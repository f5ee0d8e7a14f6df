"""Options that were set without effect are named; those left at their defaults, or set to nothing, are not."""

from __future__ import annotations

from typing import Any

import pytest

from relax_cli.config.layers import Layers, load_config
from relax_cli.config.model import option_value, options_by_name
from relax_cli.errors import Problem
from relax_cli.plugin.config_model import config_model
from relax_cli.plugin.manager import Plugins, load_plugins
from relax_cli.preflight.resolve import resolve
from relax_cli.preflight.unused_options import CONDITIONS, unused_options
from tests.support.unused_option_cases import UNUSED_OPTION_CASES


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


def unused(plugins: Plugins, flags: dict[str, Any], **env: str) -> list[Problem]:
    loaded = load_config(Layers(env=env, flags=flags), config_model(plugins.estimators().values()))
    return unused_options(loaded.config, loaded.origins, plugins.estimators())


@pytest.mark.parametrize(("rule", "bad", "more"), UNUSED_OPTION_CASES)
def test_an_option_without_effect_is_a_warning_unless_enabled(
    plugins: Plugins, rule: str, bad: dict[str, Any], more: dict[str, Any]
) -> None:
    (problem,) = unused(plugins, bad)
    assert (problem.id, problem.severity) == (rule, "warning")
    option = next(iter(bad))
    assert problem.option == f"--{option.replace('_', '-')}"
    assert problem.option in problem.message
    assert problem.option in problem.got
    assert problem.fix
    assert unused(plugins, {**bad, **more}) == []


def test_every_row_is_tested_and_names_existing_options(plugins: Plugins) -> None:
    assert {condition.kind.id for condition in CONDITIONS} <= {rule for rule, _, _ in UNUSED_OPTION_CASES}
    known = options_by_name(config_model(plugins.estimators().values()))
    assert all(option in known for effect in CONDITIONS for option in effect.options)


@pytest.mark.parametrize("name", ["ppo", "grpo", "gspo", "cispo", "sapo"])
def test_defaults_never_warn(plugins: Plugins, name: str) -> None:
    assert unused(plugins, {"advantage_estimator": name}) == []
    local = {"advantage_estimator": name, "launcher": "local", "use_dynamic_batch_size": True, "num_rollout": "1"}
    assert unused(plugins, local) == []


def test_options_of_one_kind_share_a_warning_across_layers(plugins: Plugins) -> None:
    gae, critic = unused(plugins, {"gamma": "0.9", "value_clip": "0.3"}, RELAX_LAMBD="0.9"), "--value-clip"
    assert [problem.id for problem in gae] == ["critic-option-unused", "estimator-option-unused"]
    assert gae[0].message.startswith(f"{critic} changes nothing: it only works with an estimator that has a critic")
    assert gae[1].message == "--gamma and --lambd change nothing: they belong to estimators other than grpo"
    assert gae[1].got == "--gamma 0.9, --lambd 0.9"
    assert gae[1].fix == "drop them, or start from a PPO recipe (`relax recipes list`)"


def test_nothing_is_said_of_an_estimator_that_is_not_known(plugins: Plugins) -> None:
    assert unused(plugins, {"advantage_estimator": "ppoo", "critic_lr": "1e-5"}) == []


@pytest.mark.parametrize(
    ("estimator", "earlier", "later", "left"),
    [
        ("grpo", {"critic_lr": "1e-3", "num_critic_only_steps": "5", "lambd": "0.9"}, {}, []),
        ("grpo", {"eps_clip": "0.3"}, {}, ["eps_clip"]),
        ("grpo", {"critic_lr": "1e-3"}, {"value_clip": "0.3"}, ["value_clip"]),
        ("ppo", {"critic_lr": "1e-3", "disable_grpo_std_normalization": "true"}, {}, ["critic_lr"]),
        ("sapo", {"eps_clip": "0.3", "gamma": "0.9"}, {"sapo_tau_neg": "2"}, ["sapo_tau_neg"]),
    ],
)
def test_options_of_another_estimator_end_where_it_is_replaced(
    plugins: Plugins, estimator: str, earlier: dict[str, str], later: dict[str, str], left: list[str]
) -> None:
    env = {f"RELAX_{name.upper()}": value for name, value in earlier.items()}
    flags = {"advantage_estimator": estimator, **later}
    resolved = resolve(plugins, Layers(env=env, flags=flags), None, None)
    given = {path.partition(".")[2] for path, origin in resolved.origins.items() if origin.startswith(("RELAX_", "--"))}
    assert sorted(given - {"advantage_estimator"}) == left
    warned = {p.option for p in resolved.problems if p.id in ("critic-option-unused", "estimator-option-unused")}
    assert warned == {f"--{name.replace('_', '-')}" for name in later if name != "sapo_tau_neg"}
    for name in earlier.keys() - set(left):
        assert option_value(resolved.given, name) == option_value(type(resolved.given)(), name)
