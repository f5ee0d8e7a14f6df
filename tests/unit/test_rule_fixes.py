"""What the fix of a rule says to change is changed, and then the problem is gone and no other error is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_cli.config.layers import Layers
from relax_cli.config.sglang_options import ServerOption
from relax_cli.errors import Problem, is_about_machine
from relax_cli.plugin.config_model import config_model
from relax_cli.preflight import check_run as checks
from relax_cli.preflight.rules import RULES
from relax_cli.preflight.rules import sglang as sglang_rules
from tests.support.cli_app import built_in_plugins
from tests.support.fixes import Flags, ways_out
from tests.support.rule_cases import PPO_ROLES, REFUSED_AND_NEAR_MISS
from tests.support.rules import UNKNOWN
from tests.support.standins import write_uncounted_tokenizer, write_weights
from tests.support.unused_option_cases import UNUSED_OPTION_CASES

PLUGINS = built_in_plugins()
MODEL = config_model(PLUGINS.estimators().values())
BASE: Flags = {
    "hf_checkpoint": "model",
    "prompt_data": "train.jsonl",
    "label_key": "label",
    "num_rollout": "2",
    "rollout_max_response_len": "4",
    "rm_type": "exact",
    "device": "cpu",
    "resource": json.dumps({"actor": [1, 1], "rollout": [1, 1]}),
    "advantage_estimator": "grpo",
}
PPO: Flags = {
    "advantage_estimator": "ppo",
    "resource": json.dumps(PPO_ROLES),
    "colocate": True,
    "use_rollout_logprobs": True,
}
EXTERNAL: Flags = {"rollout_external": True, "rollout_external_engine_addrs": ["a:1"]}
ON_GPUS: Flags = {"device": "cuda", "resource": json.dumps({"actor": [1, 2], "rollout": [1, 2]})}
SERVER_OPTIONS = {
    "mem_fraction_static": ServerOption(),
    "quiet": ServerOption("bool"),
    "mode": ServerOption("str", ("auto", "slow")),
}
MORE: list[tuple[str, Flags]] = [
    ("ppo-needs-critic", PPO | {"resource": json.dumps({"actor": [1, 2], "rollout": [1, 1], "advantages": [1, 0]})}),
    ("ppo-needs-advantages", PPO | {"resource": json.dumps({"actor": [1, 1], "critic": [1, 1], "rollout": [1, 1]})}),
    ("ppo-needs-colocate", PPO | {"colocate": False}),
    ("ppo-no-fully-async", PPO | {"fully_async": True}),
    ("ppo-needs-rollout-logprobs", PPO | {"use_rollout_logprobs": False}),
    ("ppo-kl-off", PPO | {"kl_coef": "0.1", "use_kl_loss": True}),
    ("group-size", {"n_samples_per_prompt": "1"}),
    ("sglang-external-addresses", {"rollout_external_engine_addrs": ["a:1"]}),
    ("sglang-address", EXTERNAL | {"rollout_external_engine_addrs": ["a"]}),
    ("sglang-external-workers", EXTERNAL | {"resource": json.dumps({"actor": [1, 1], "rollout": [1, 2]})}),
    ("unequal-shapes", ON_GPUS | {"resource": json.dumps({"actor": [1, 1], "rollout": [1, 2]})}),
    ("sglang-address-twice", EXTERNAL | {"rollout_external_engine_addrs": ["a:1", "a:1"]}),
    ("sglang-external-embedded", EXTERNAL | {"rollout_engine": "embedded"}),
    ("sglang-external-options", EXTERNAL | {"sglang_mem_fraction_static": "0.5"}),
    ("sglang-gpus-per-engine", ON_GPUS | {"rollout_num_gpus_per_engine": "3"}),
    ("sglang-option-reserved", ON_GPUS | {"sglang_options": '{"tp_size": 2}'}),
    ("sglang-option-unknown", ON_GPUS | {"sglang_options": '{"zzz": 2}'}),
    ("sglang-option-value", ON_GPUS | {"sglang_options": '{"quiet": "true"}'}),
    ("sglang-option-value", ON_GPUS | {"sglang_options": '{"quiet": "no"}'}),
    ("sglang-option-value", ON_GPUS | {"sglang_options": '{"mode": "slwo"}'}),
    ("sglang-option-unknown", ON_GPUS | {"sglang_options": '{"mem_fraction_statik": 0.5}'}),
    ("sglang-python-relative", ON_GPUS | {"sglang_python": "sgl/bin/python"}),
    ("sglang-greedy-temperature", ON_GPUS | {"rollout_top_k": "1", "rollout_temperature": "0.5"}),
    ("partial-rollout-stop", ON_GPUS | {"partial_rollout": True, "rollout_stop": ["x"]}),
    ("embedded-engine-on-cuda", ON_GPUS | {"rollout_engine": "embedded"}),
    ("update-weight-transport", ON_GPUS | {"update_weight_transport": "distributed"}),
    ("update-weight-transport", ON_GPUS | EXTERNAL | {"update_weight_transport": "tensor"}),
    ("transformer-engine-needs-cuda", {"transformer_impl": "transformer_engine"}),
    ("prompt-data-source", {"prompt_data": ["train.jsonl@[0:2:0]"]}),
    ("tracker-unknown", {"track": ["tensorbord"]}),
    ("reward-twice", {"custom_rm_path": "reward.py:judge"}),
    (
        "recompute-layers",
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": "4"},
    ),
    (
        "tensor-parallel-indivisible",
        {"tensor_model_parallel_size": "3", "resource": json.dumps({"actor": [1, 6], "rollout": [1, 1]})},
    ),
]
NOT_AN_EDIT = {
    "model-missing": "which model is the user's to say",
    "model-folder-missing": "which model is the user's to say",
    "reward-weights": "weights are the user's to say",
    "env-unknown": "which environment is the user's to say",
    "chat-template-kwargs-reserved": "one key of an object goes",
    "eval-sampling": "one word of a list is to be corrected",
    "eval-data-name": "names are the user's to say",
    "batch-smaller-than-ranks": "several numbers can change, each in one direction",
    "sglang-address-twice": "one of two equal words goes",
    "unequal-shapes": "more GPUs for one role, or fewer for another",
}
"""Rules whose fix has something to fill in or names a direction, and why."""
LEADS_TO = {"recompute-option-unused": {"recompute-incomplete"}}
"""Fixes that turn something on, which then asks for the rest of its options."""


def typed(value: Any) -> Any:
    """A value of a configuration as a flag gives it; None where it is not given."""
    if value == "":
        return None
    if value is None or isinstance(value, dict):
        return json.dumps(value)
    return value if isinstance(value, bool | list) else str(value)


SITUATIONS = [
    *(
        (
            rule,
            {"resource": typed(PPO_ROLES), "n_samples_per_prompt": "1"}
            # Other estimators have no critic.
            | (PPO if "critic" in json.dumps(bad) else {})
            | {path.partition("__")[2]: typed(v) for path, v in bad.items()},
        )
        for rule, bad, _ in REFUSED_AND_NEAR_MISS
        if bad.get("reward__reward_key") != ""
    ),
    *((rule, bad) for rule, bad, _ in UNUSED_OPTION_CASES),
    *MORE,
]


@pytest.fixture(autouse=True)
def _a_folder_with_a_model_and_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "Machine", lambda: UNKNOWN)
    monkeypatch.setattr(sglang_rules, "installed_options", lambda python: SERVER_OPTIONS)
    config = {
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "num_hidden_layers": 3,
        "hidden_size": 16,
        "intermediate_size": 32,
        "vocab_size": 16,
    }
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(config))
    write_uncounted_tokenizer(Path("model"), monkeypatch)
    write_weights(Path("model"))
    Path("train.jsonl").write_text('{"input": "1+1=", "label": "2"}\n' * 3)
    Path("reward.py").write_text("def judge(samples): ...\n")


def found(flags: Flags) -> list[Problem]:
    checked = checks.check_run(PLUGINS, Layers(flags=flags), here=False)
    return [*checked.problems, *checked.notes]


@pytest.mark.parametrize(("rule", "bad"), SITUATIONS)
def test_the_problem_is_gone_after_its_fix(rule: str, bad: Flags) -> None:
    flags = BASE | bad
    before = found(flags)
    problem = next(p for p in before if p.id == rule)
    ways = list(ways_out(problem, flags, MODEL))
    assert ways or rule in NOT_AN_EDIT, f"no way out that can be typed: {problem.fix}"
    for way, changed in ways:
        after = found(changed)
        assert rule not in [p.id for p in after], way
        errors = {p.id for p in after if p.severity == "error" and not is_about_machine(p)}
        assert errors <= {p.id for p in before} | LEADS_TO.get(rule, set()), way


def test_every_rule_about_options_has_its_fix_executed() -> None:
    """Fixes about a machine or about files are commands for them, not edits of options."""
    rules = {rule.kind.id for rule in RULES if rule.needs == "config"}
    assert sorted(rules - {rule for rule, _ in SITUATIONS}) == []
