"""A later layer replaces an earlier one: options that exclude each other, null, `~` and variables in paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_cli.config.layers import Layers, Loaded, load_config
from relax_cli.config.model import base_type, flag, option_value, options_by_name
from relax_cli.config.replaced import EVALUATED, REPLACEMENTS
from relax_cli.config.schema import Config
from relax_cli.config.values import PATH_OPTIONS, expand_path
from relax_cli.plugin.manager import load_plugins
from relax_cli.preflight.check_run import check_run

OPTIONS = options_by_name(Config)


def recipe(folder: Path, **values: Any) -> str:
    """A recipe with these options."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        sections.setdefault(OPTIONS[name][0], {})[name] = value
    path = folder / "r.yaml"
    path.write_text(json.dumps(sections))
    return str(path)


def load(*args: Any) -> Loaded:
    loaded = load_config(Layers(*args), Config)
    assert loaded.problems == ()
    return loaded


# What a recipe says, what a later layer says, what is left of the recipe's options.
PAIRS: list[tuple[dict[str, Any], str, Any, dict[str, Any]]] = [
    ({"rm_type": "exact"}, "custom_rm_path", "r.py:f", {"rm_type": None}),
    ({"rm_type": "remote", "rm_url": "http://h"}, "custom_rm_path", "r.py:f", {"rm_type": None, "rm_url": None}),
    ({"custom_rm_path": "r.py:f"}, "rm_type", "math", {"custom_rm_path": None}),
    ({"rm_type": "remote", "rm_url": "http://h"}, "rm_type", "math", {"rm_url": None}),
    ({"rm_url": "http://h"}, "rm_type", "remote", {"rm_url": "http://h"}),
    ({"env": "e.py:E", "max_turns": 3, "env_timeout": 9.0}, "rm_type", "math",
     {"env": None, "max_turns": 8, "env_timeout": 600.0}),
    ({"env": "e.py:E", "max_turns": 3, "env_timeout": 9.0}, "custom_rm_path", "r.py:f",
     {"env": None, "max_turns": 8, "env_timeout": 600.0}),
    ({"env": "e.py:E", "max_turns": 3, "env_timeout": 9.0}, "env", None, {"max_turns": 8, "env_timeout": 600.0}),
    ({"rm_type": "remote", "rm_url": "http://h", "reward_key": "a", "rm_timeout": 9.0}, "env", "e.py:E",
     {"rm_type": None, "rm_url": None, "reward_key": None, "rm_timeout": 3600.0}),
    ({"custom_rm_path": "r.py:f"}, "env", "e.py:E", {"custom_rm_path": None}),
    ({"num_rollout": 7}, "num_epoch", 2, {"num_rollout": None}),
    ({"num_epoch": 7}, "num_rollout", 2, {"num_epoch": 1}),
    ({"num_steps_per_rollout": 4}, "global_batch_size", 16, {"num_steps_per_rollout": None}),
    ({"global_batch_size": 16}, "num_steps_per_rollout", 2, {"global_batch_size": None}),
    ({"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64}, "micro_batch_size", 4,
     {"use_dynamic_batch_size": False, "max_tokens_per_gpu": None}),
    ({"micro_batch_size": 4}, "use_dynamic_batch_size", True, {"micro_batch_size": 32}),
    ({"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64}, "use_dynamic_batch_size", False,
     {"max_tokens_per_gpu": None}),
    ({"lr_decay_style": "cosine", "min_lr": 1e-7}, "lr_decay_style", "constant", {"min_lr": 0.0}),
    ({"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}, "use_kl_loss", False,
     {"kl_loss_coef": 0.0, "kl_loss_type": "k1"}),
    ({"calculate_per_token_loss": True}, "loss_aggregation", "constant", {"calculate_per_token_loss": False}),
    ({"loss_aggregation": "constant"}, "calculate_per_token_loss", True, {"loss_aggregation": None}),
    ({"use_tis": True, "tis_clip": 3.0}, "use_tis", False, {"tis_clip": 2.0}),
    ({"save": "c", "save_interval": 2, "critic_save": "d"}, "save", None, {"save_interval": None, "critic_save": None}),
    ({"eval_prompt_data": ["a=b"], "eval_interval": 2}, "eval_prompt_data", [], {"eval_interval": None}),
    ({"eval_prompt_data": ["a=b"], "eval_interval": 2}, "eval_interval", None, {"eval_prompt_data": ()}),
    ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
     "recompute_granularity", "selective", {"recompute_method": None, "recompute_num_layers": None}),
    ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, "recompute_granularity", "full",
     {"recompute_modules": ()}),
    ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, "tensor_model_parallel_size", 1,
     {"sequence_parallel": False}),
    ({"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 1},
     "pipeline_model_parallel_size", 1,
     {"decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None}),
    ({"rollout_external": True, "rollout_external_engine_addrs": ["h:1"]}, "rollout_external", False,
     {"rollout_external_engine_addrs": ()}),
    ({"rollout_external": True}, "rollout_engine", "embedded", {"rollout_external": False}),
    ({"rollout_engine": "embedded"}, "rollout_external", True, {"rollout_engine": "auto"}),
    ({"overlap_updates": True}, "device", "cuda", {"overlap_updates": False}),
    ({"cpu_matmul_precision": "bf16"}, "device", "cuda", {"cpu_matmul_precision": "fp32"}),
    ({"overlong_penalty": 0.5, "overlong_buffer_len": 4}, "overlong_penalty", 0.0, {"overlong_buffer_len": None}),
    ({"reward_on_error": "zero"}, "env", "e.py:Env", {"reward_on_error": "stop"}),
    ({"partial_rollout": True, "partial_rollout_len": 7}, "partial_rollout", False, {"partial_rollout_len": None}),
    ({"dynamic_sampling": True, "dynamic_sampling_max_rounds": 7, "over_sampling_batch_size": 9}, "dynamic_sampling",
     False, {"over_sampling_batch_size": None, "dynamic_sampling_max_rounds": 10}),
    ({"optimizer_cpu_offload": True}, "device", "cpu", {"optimizer_cpu_offload": False}),
    ({"ray_num_cpus": 8, "queue_timeout": 9.0}, "launcher", "local", {"ray_num_cpus": None, "queue_timeout": 120.0}),
    ({"apply_chat_template": True, "system_prompt": "s", "chat_template_kwargs": {"a": 1}}, "apply_chat_template",
     False, {"system_prompt": None, "chat_template_kwargs": {}}),
    ({"rollout_max_prompt_len": 9, "overlong_prompts": "drop"}, "rollout_max_prompt_len", None,
     {"overlong_prompts": "error"}),
]  # fmt: skip


@pytest.mark.parametrize(("earlier", "option", "value", "left"), PAIRS)
def test_a_later_value_ends_what_contradicts_it(
    tmp_path: Path, earlier: dict[str, Any], option: str, value: Any, left: dict[str, Any]
) -> None:
    text, section = json.dumps(value), OPTIONS[option][0]
    layers: list[tuple[Any, ...]] = [
        ([recipe(tmp_path, **earlier)], {}, [f"{section}.{option}={text}"]),
        ([recipe(tmp_path, **earlier)], {f"RELAX_{option.upper()}": text}),
    ]
    if value not in (None, []):
        layers.append(([recipe(tmp_path, **earlier)], {}, (), {option: value}))
    for layer in layers:
        loaded = load(*layer)
        assert {name: option_value(loaded.config, name) for name in left} == left
        changed = [name for name in left if left[name] != earlier.get(name)]
        assert all(loaded.origins[f"{OPTIONS[name][0]}.{name}"] == "default" for name in changed)


def test_within_one_layer_nothing_is_replaced(tmp_path: Path) -> None:
    config = load([recipe(tmp_path, rm_type="exact", custom_rm_path="r.py:f", num_rollout=3, num_epoch=2)]).config
    assert (config.reward.rm_type, config.reward.custom_rm_path) == ("exact", "r.py:f")
    assert (config.batch.num_rollout, config.batch.num_epoch) == (3, 2)
    assert load((), {}, (), {"rm_type": "exact", "custom_rm_path": "r.py:f"}).config.reward.rm_type == "exact"


def test_an_earlier_layer_never_ends_a_later_one(tmp_path: Path) -> None:
    config = load([recipe(tmp_path, custom_rm_path="r.py:f")], {}, ["reward.rm_type=exact"], {"rm_type": "math"}).config
    assert (config.reward.rm_type, config.reward.custom_rm_path) == ("math", None)


def test_every_replacement_has_a_row_in_the_table() -> None:
    assert {(r.option, name) for r in REPLACEMENTS for name in r.ended} <= {
        *((option, name) for _, option, _, left in PAIRS for name in left),
        ("save", "keep_checkpoints"),
        ("save", "on_save_error"),
        ("save", "async_save"),
        ("save", "keep_best"),
        ("use_tis", "tis_clip_low"),
        ("env", "reward_on_error"),
        ("overlong_penalty", "overlong_buffer_len"),
        *((option, name) for option in ("eval_prompt_data", "eval_interval") for name in EVALUATED),
    }


@pytest.mark.parametrize("name", OPTIONS)
def test_null_unsets_every_option(tmp_path: Path, name: str) -> None:
    field = OPTIONS[name][1]
    given = {
        "save": "c",
        "rm_type": "exact",
        "num_epoch": 3,
        "input_key": "k",
        "rollout_batch_size": 5,
        "eps_clip": 0.3,
    }
    layers = [([], {}, [f"{OPTIONS[name][0]}.{name}=null"]), ([], {f"RELAX_{name.upper()}": "null"})]
    if base_type(field) is not bool and "tuple" not in str(field.annotation):
        layers.append(([], {}, (), {name: "null"}))
    for _, *layer in layers:
        config = load([recipe(tmp_path, **{k: v for k, v in given.items() if k == name})], *layer).config
        default = field.get_default(call_default_factory=True)
        assert option_value(config, name) in (None, default)


@pytest.mark.parametrize("name", sorted(PATH_OPTIONS))
@pytest.mark.parametrize(("text", "expanded"), [("~/c", "/home/me/c"), ("$DIR/c", "/data/c"), ("a~/c", "a~/c")])
def test_paths_are_expanded_in_every_layer(tmp_path: Path, name: str, text: str, expanded: str) -> None:
    env = {"HOME": "/home/me", "DIR": "/data"}
    is_set, label = "tuple" in str(OPTIONS[name][1].annotation), "held=" if name == "eval_prompt_data" else ""
    given, wanted = (f"{label}{text}", (f"{label}{expanded}",)) if is_set else (text, expanded)
    layers: list[tuple[Any, ...]] = [
        ([recipe(tmp_path, **{name: [given] if is_set else given})], env),
        ([], {**env, f"RELAX_{name.upper()}": given}),
        ([], env, [f"{OPTIONS[name][0]}.{name}={given}"]),
        ([], env, (), {name: [given] if is_set else given}),
    ]
    assert [option_value(load(*layer).config, name) for layer in layers] == [wanted] * len(layers)


@pytest.mark.parametrize(
    ("text", "expanded", "missing"),
    [
        ("~", "/home/me", []), ("~/a b", "/home/me/a b", []), ("x ~/a", "x /home/me/a", []),
        ("~nobody-here/a",) * 2 + ([],),
        ("${DIR}/a", "/data/a", []), ("$DIR$DIR", "/data/data", []), ("$GONE/a", "/a", ["GONE"]), ("a$", "a$", []),
        ("reasoning-gym:sum?size=2", "reasoning-gym:sum?size=2", []), ("$1/a", "$1/a", []),
        ("~/r.py:f", "/home/me/r.py:f", []),
    ],
)  # fmt: skip
def test_what_is_expanded(text: str, expanded: str, missing: list[str]) -> None:
    assert expand_path(text, {"HOME": "/home/me", "DIR": "/data"}) == (expanded, missing)


def test_a_path_with_an_unset_variable_is_refused(tmp_path: Path) -> None:
    for layer in (
        ([recipe(tmp_path, save="$GONE/c")],),
        ([], {"RELAX_SAVE": "$GONE/c"}),
        ([], {}, (), {"save": "${GONE}/c"}),
    ):
        (problem,) = load_config(Layers(*layer), Config).problems
        assert (problem.id, problem.option) == ("path-variable", "--save")


@pytest.mark.parametrize(("text", "kept"), [
    ("Use # for a title", "Use # for a title"), ("# Task", "# Task"), ("one\ntwo", "one\ntwo"), ("&a b", "&a b"),
    ("- x", "- x"), ("a: b", "a: b"), ("123", "123"), ("[x]", "[x]"), ("'null'", "null"), ('"a\\nb"', "a\nb"),
])  # fmt: skip
def test_a_text_option_keeps_what_was_typed(tmp_path: Path, text: str, kept: str) -> None:
    expanded = tmp_path / "expanded.yaml"
    expanded.write_text("data: {system_prompt: '${TEXT}'}")
    for layers in (
        Layers(env={"RELAX_SYSTEM_PROMPT": text}),
        Layers(overrides=[f"data.system_prompt={text}"]),
        Layers([str(expanded)], {"TEXT": text}),
    ):
        assert load_config(layers, Config).config.data.system_prompt == kept
    stops = load_config(Layers(env={"RELAX_ROLLOUT_STOP": text}), Config).config.rollout.rollout_stop
    assert stops == (("x",) if text == "[x]" else (kept,))


@pytest.mark.parametrize("name", ["lr", "num_rollout", "save", "shuffle", "lr_decay_style", "resource", "track"])
def test_an_empty_variable_unsets_nothing(tmp_path: Path, name: str) -> None:
    """A script's `RELAX_LR=$LR` without `LR` would otherwise replace the recipe's rate by the default."""
    for layers in (Layers(env={f"RELAX_{name.upper()}": ""}), Layers(overrides=[f"{OPTIONS[name][0]}.{name}="])):
        (problem,) = load_config(layers, Config).problems
        assert (problem.id, problem.option) in {("invalid-value", flag(name)), ("resource-json", flag(name))}


@pytest.mark.parametrize(("variable", "fix"), [
    ("RELAX_SHUFFLE", "write RELAX_SHUFFLE=true (or false)"), ("RELAX_RECIPE", "unset RELAX_RECIPE"),
    ("RELAX_CACH", "use RELAX_CACHE, or `unset RELAX_CACH`"),
])  # fmt: skip
def test_the_fix_of_a_variable_is_about_a_variable(variable: str, fix: str) -> None:
    (problem,) = load_config(Layers(env={variable: "1"}), Config).problems
    assert problem.fix == fix


@pytest.mark.parametrize("name", ["save", "load", "run_dir", "rm_type", "input_key", "advantage_estimator", "ref_load"])
def test_an_empty_text_is_refused(name: str) -> None:
    (problem,) = load_config(Layers(flags={name: ""}), Config).problems
    assert (problem.id, problem.option) == ("invalid-value", flag(name))


@pytest.mark.parametrize("layer", [
    {"flags": {"rollout_stop": [""]}}, {"flags": {"rollout_stop": ["a", ""]}}, {"env": {"RELAX_ROLLOUT_STOP": ""}},
    {"overrides": ['rollout.rollout_stop=["","$"]']}, {"overrides": ["rollout.rollout_stop=''"]},
])  # fmt: skip
def test_an_empty_stop_string_is_refused_in_every_layer(layer: dict[str, Any]) -> None:
    (problem,) = load_config(Layers(**layer), Config).problems
    assert (problem.id, problem.option) == ("invalid-value", "--rollout-stop")


@pytest.mark.parametrize("name", ["prompt_data", "eval_prompt_data", "track", "rollout_external_engine_addrs"])
@pytest.mark.parametrize("value", ["", ["a", ""]])
def test_an_empty_item_of_a_list_is_refused(name: str, value: str | list[str]) -> None:
    (problem,) = load_config(Layers(flags={name: value}), Config).problems
    assert (problem.id, problem.option) == ("invalid-value", flag(name))


@pytest.mark.parametrize(("section", "text", "expected", "fix"), [
    ("data", "label_key: 2026-01-01", "a valid string", "put the value of data.label_key in quotes"),
    ("rollout", "rollout_stop: [1]", "a valid string", "put the value of rollout.rollout_stop in quotes"),
    ("rollout", "rollout_stop: 1", "a list", "give rollout.rollout_stop a value that is a list"),
    ("parallel", "resource: {actor: [1]}", 'a JSON object {"role": [services, devices]}', None),
    ("parallel", "resource: {actor: 1}", 'a JSON object {"role": [services, devices]}', None),
    ("parallel", "resource: {actor: [1, 99999]}", "less than or equal to 65536", None),
])  # fmt: skip
def test_a_wrong_type_says_what_to_write(tmp_path: Path, section: str, text: str, expected: str, fix: str) -> None:
    (path := tmp_path / "r.yaml").write_text(f"{section}: {{{text}}}")
    (problem,) = load_config(Layers([str(path)]), Config).problems
    assert problem.expected == expected
    assert fix in (None, problem.fix)


@pytest.mark.parametrize(("estimator", "size"), [("grpo", 8), ("gspo", 8), ("cispo", 8), ("sapo", 8), ("ppo", 1)])
def test_the_group_size_follows_the_estimator(estimator: str, size: int) -> None:
    plugins = load_plugins()
    checked = check_run(plugins, Layers(flags={"advantage_estimator": estimator}), skip_files=True)
    assert checked.config.batch.n_samples_per_prompt == size
    assert "group-size" not in {problem.id for problem in checked.problems}
    given = check_run(
        plugins, Layers(flags={"advantage_estimator": estimator, "n_samples_per_prompt": "4"}), skip_files=True
    )
    assert given.config.batch.n_samples_per_prompt == 4


def test_a_run_has_no_places_for_roles_that_it_lacks() -> None:
    """GRPO from a recipe of PPO has no critic, whose ranks, rates and checkpoints would be counted."""
    sets = [
        "algorithm.advantage_estimator=grpo", "batch.n_samples_per_prompt=4", "checkpoint.save=ck",
        'parallel.resource={"actor": [1, 1], "critic": [1, 3], "rollout": [1, 1], "advantages": [1, 0]}',
        "critic.critic_save=c", "critic.critic_lr=1e-6", "critic.num_critic_only_steps=40",
        "optimizer.lr_decay_style=linear", "optimizer.min_lr=1e-5",
    ]  # fmt: skip
    checked = check_run(load_plugins(), Layers(["tiny-ppo-cpu"], {}, sets), here=False)
    assert checked.config.parallel.resource == {"actor": (1, 1), "rollout": (1, 1)}
    assert [problem.id for problem in checked.problems] == ["critic-option-unused"]
    assert checked.plan is not None
    assert checked.plan.memory is not None
    # fp32 weights and Adam's two moments of the actor alone.
    assert checked.plan.memory.checkpoint == 12 * 527_104


def test_a_bare_run_needs_only_a_model_data_and_a_reward() -> None:
    checked = check_run(load_plugins(), Layers(), here=False)
    assert {problem.id for problem in checked.problems} == {"model-missing", "prompt-data-missing", "reward-missing"}
