"""Options that were set without effect are named; those left at their defaults, or set to nothing, are not."""

from __future__ import annotations

from typing import Any

import pytest

from relax_cli.config.layers import config_model, load_config
from relax_cli.config.model import options_by_name
from relax_cli.errors import Problem
from relax_cli.plugin.manager import Plugins, load_plugins
from relax_cli.preflight.unused_options import EFFECTS, unused_options


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


def unused(plugins: Plugins, flags: dict[str, Any], **env: str) -> list[Problem]:
    loaded = load_config([], env, [], flags, config_model=config_model(plugins.estimators().values()))
    return unused_options(loaded.config, loaded.origins, plugins.estimators())


ON = True
RULES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("critic-option-unused", {"critic_lr": "1e-5"}, {"advantage_estimator": "ppo"}),
    ("critic-option-unused", {"num_critic_only_steps": "3"}, {"num_critic_only_steps": "0"}),
    ("critic-option-unused", {"critic_init_from_actor": ON}, {"advantage_estimator": "ppo"}),
    ("kl-option-unused", {"kl_loss_coef": "0.1"}, {"use_kl_loss": ON}),
    ("kl-option-unused", {"kl_loss_type": "k3", "kl_coef": "0.1"}, {"use_kl_loss": ON}),
    ("ref-load-unused", {"ref_load": "model"}, {"use_kl_loss": ON}),
    ("ref-load-unused", {"ref_load": "model"}, {"kl_coef": "0.1"}),
    ("tis-option-unused", {"tis_clip": "3"}, {"use_tis": ON}),
    ("tis-option-unused", {"tis_clip_low": "0.5"}, {"tis_clip_low": "0"}),
    ("min-lr-unused", {"min_lr": "1e-7"}, {"lr_decay_style": "linear"}),
    ("token-budget-unused", {"max_tokens_per_gpu": "512"}, {"use_dynamic_batch_size": ON}),
    (
        "micro-batch-size-unused",
        {"micro_batch_size": "4", "use_dynamic_batch_size": ON},
        {"use_dynamic_batch_size": False},
    ),
    ("sglang-option-unused", {"sglang_mem_fraction_static": "0.5"}, {"device": "cuda"}),
    ("sglang-option-unused", {"sglang_options": '{"log_level": "debug"}'}, {"rollout_engine": "sglang"}),
    ("sglang-option-unused", {"partial_rollout": ON, "rollout_engine": "embedded"}, {"rollout_engine": "sglang"}),
    ("sglang-option-unused", {"rollout_request_timeout": "60"}, {"rollout_external": ON}),
    ("recompute-option-unused", {"recompute_method": "uniform"}, {"recompute_granularity": "full"}),
    (
        "recompute-option-unused",
        {"recompute_num_layers": "2", "recompute_granularity": "selective"},
        {"recompute_granularity": "full"},
    ),
    ("recompute-option-unused", {"recompute_modules": ["mlp"]}, {"recompute_granularity": "selective"}),
    ("sequence-parallel-unused", {"sequence_parallel": ON}, {"tensor_model_parallel_size": "2"}),
    ("cpu-offload-unused", {"optimizer_cpu_offload": ON, "device": "cpu"}, {"device": "cuda"}),
    ("num-epoch-unused", {"num_epoch": "2", "num_rollout": "9"}, {"num_rollout": None}),
    ("save-option-unused", {"keep_checkpoints": "2"}, {"save": "actor"}),
    ("save-option-unused", {"on_save_error": "continue"}, {"save": "actor"}),
    ("eval-option-unused", {"n_samples_per_eval_prompt": "4"}, {"eval_prompt_data": ["h=x.jsonl"]}),
    ("sglang-option-unused", {"sglang_server_concurrency": "8"}, {"device": "cuda"}),
    ("sglang-option-unused", {"partial_rollout": ON}, {"rollout_engine": "sglang"}),
    ("ray-option-unused", {"ray_num_cpus": "8", "launcher": "local"}, {"launcher": "ray"}),
    ("ray-option-unused", {"queue_timeout": "8", "launcher": "local"}, {"launcher": "ray"}),
    ("estimator-option-unused", {"eps_clip_c": "3", "advantage_estimator": "sapo"}, {"advantage_estimator": "grpo"}),
    ("estimator-option-unused", {"eps_clip": "0.1", "advantage_estimator": "sapo"}, {"advantage_estimator": "gspo"}),
    ("estimator-option-unused", {"lambd": "0.95"}, {"advantage_estimator": "ppo"}),
    ("estimator-option-unused", {"sapo_tau_neg": "2"}, {"advantage_estimator": "sapo"}),
    ("estimator-option-unused", {"cispo_two_sided": ON}, {"cispo_two_sided": False}),
    (
        "estimator-option-unused",
        {"disable_grpo_std_normalization": ON, "advantage_estimator": "ppo"},
        {"advantage_estimator": "cispo"},
    ),
]


@pytest.mark.parametrize(("rule", "bad", "more"), RULES)
def test_a_set_option_without_effect_is_a_warning_and_with_what_it_needs_it_is_none(
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


def test_every_row_of_the_table_is_tested_and_names_options_that_exist(plugins: Plugins) -> None:
    assert {effect.rule for effect in EFFECTS} <= {rule for rule, _, _ in RULES}
    known = options_by_name(config_model(plugins.estimators().values()))
    assert all(option in known for effect in EFFECTS for option in effect.options)


@pytest.mark.parametrize("name", ["ppo", "grpo", "gspo", "cispo", "sapo"])
def test_defaults_never_warn(plugins: Plugins, name: str) -> None:
    assert unused(plugins, {"advantage_estimator": name}) == []
    local = {"advantage_estimator": name, "launcher": "local", "use_dynamic_batch_size": True, "num_rollout": "1"}
    assert unused(plugins, local) == []


def test_options_of_one_kind_share_a_warning_whatever_layer_set_them(plugins: Plugins) -> None:
    gae, critic = unused(plugins, {"gamma": "0.9", "value_clip": "0.3"}, RELAX_LAMBD="0.9"), "--value-clip"
    assert [problem.id for problem in gae] == ["critic-option-unused", "estimator-option-unused"]
    assert gae[0].message.startswith(f"{critic} changes nothing: it only works with an estimator that has a critic")
    assert gae[1].message == "--gamma and --lambd change nothing: they belong to estimators other than grpo"
    assert gae[1].got == "--gamma 0.9, --lambd 0.9"
    assert gae[1].fix == "--advantage-estimator ppo or drop them"


def test_nothing_is_said_of_an_estimator_that_is_not_known(plugins: Plugins) -> None:
    assert unused(plugins, {"advantage_estimator": "ppoo", "critic_lr": "1e-5"}) == []
