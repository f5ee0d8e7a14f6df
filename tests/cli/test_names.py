"""Names of other trainers, misspelt ones, and words that belong to no option, in every layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_cli.config.layers import Layers, load_config
from relax_cli.config.model import flag, options_by_name
from relax_cli.config.names import NOT_HERE, OTHER_TRAINERS, done_otherwise, meant_option
from relax_cli.config.schema import Config
from tests.support.cli_app import Invoke

OPTIONS = options_by_name(Config)
MEANT = [
    ("learning_rate", "lr"), ("model", "hf_checkpoint"), ("max_steps", "num_rollout"), ("beta", "kl_loss_coef"),
    ("num_generations", "n_samples_per_prompt"), ("train_batch_size", "rollout_batch_size"),
    ("per_device_train_batch_size", "micro_batch_size"), ("max_completion_length", "rollout_max_response_len"),
    ("output_dir", "save"), ("dataset", "prompt_data"), ("reward_funcs", "custom_rm_path"), ("cliprange", "eps_clip"),
    ("gae_lambda", "lambd"), ("temperature", "rollout_temperature"), ("num_train_epochs", "num_epoch"),
    ("warmup_steps", "lr_warmup_iters"), ("max_grad_norm", "clip_grad"), ("save_steps", "save_interval"),
    ("resume_from_checkpoint", "load"), ("rollout_batchsize", "rollout_batch_size"), ("clip_gard", "clip_grad"),
    ("lern_rate", "lr"), ("learning_rat", "lr"), ("num_generation", "n_samples_per_prompt"),
    ("max_step", "num_rollout"), ("max_completion_lenght", "rollout_max_response_len"),
    ("warmup_step", "lr_warmup_iters"), ("target_modules", "lora_targets"), ("kl_coeff", "kl_coef"),
    ("clipgrad", "clip_grad"), ("loss_agg_mode", "loss_aggregation"), ("max_tokens", "rollout_max_response_len"),
    ("rollout_temprature", "rollout_temperature"),
]  # fmt: skip


def test_the_table_names_options_and_no_name_twice() -> None:
    assert OTHER_TRAINERS.keys() <= OPTIONS.keys()
    others = [other for names in OTHER_TRAINERS.values() for other in names.split()]
    assert len(others) == len(set(others))
    assert not set(others) & {*OPTIONS, *NOT_HERE}


@pytest.mark.parametrize(
    "name",
    [
        "frobnicate",
        "beta3x",
        "help_me",
        "config",
        "ppo_epochs",
        "x",
        "",
        "rollout_stop_token_ids",
        "target_kl",
        "kl_target",
        "rollout_function_path",
        "rollout_shuffle",
        "use_liger_loss",
        "eval_batch_size",
        "vf_loss_coef",
        "dp_size",
        "reward_scale",
        "reward_clip",
        "min_new_tokens",
        "max_samples",
        "local_rank",
        "optimizer",
        "checkpoint",
        # Their options of nearly the same name mean something else here.
        "critic_pretrain",
        "kl_penalty",
        "max_epochs",
        "ppo_mini_batch_size",
        "reward_model",
        "whiten_rewards",
    ],
)
def test_a_name_that_nobody_knows_gets_no_guess(name: str) -> None:
    assert meant_option(name, OPTIONS) == ""


@pytest.mark.parametrize(("name", "option"), MEANT)
def test_other_names_lead_to_the_option_in_every_layer(invoke: Invoke, tmp_path: Path, name: str, option: str) -> None:
    section = OPTIONS[option][0]
    shown = invoke("train", f"--{name.replace('_', '-')}", "1", "--format", "json")
    assert shown.exit_code == 2
    (problem,) = json.loads(shown.stdout)["problems"]
    assert (problem["id"], problem["fix"]) == ("unknown-option", f"use {flag(option)}")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"optimizer:\n  {name}: 1\n")
    (problem,) = load_config(Layers([str(recipe)]), Config).problems
    assert (problem.id, problem.fix) == ("unknown-key", f"use {section}.{option}")
    recipe.write_text(f"{name}: 1\n")
    (problem,) = load_config(Layers([str(recipe)]), Config).problems
    if name not in Config.model_fields:
        assert (problem.id, problem.fix) == ("unknown-section", f"put {option} under `{section}:`")
    (problem,) = load_config(Layers(overrides=[f"{name}=1"]), Config).problems
    assert (problem.id, problem.fix) == ("set-syntax", f"--set {section}.{option}=1")
    (problem,) = load_config(Layers(overrides=[f"optimizer.{name}=1"]), Config).problems
    assert (problem.id, problem.fix) == ("unknown-key", f"--set {section}.{option}=1")
    (problem,) = load_config(Layers(env={f"RELAX_{name.upper()}": "1"}), Config).problems
    assert problem.expected == f"RELAX_{option.upper()}"


@pytest.mark.parametrize("name", NOT_HERE)
def test_what_is_done_otherwise_is_explained(invoke: Invoke, tmp_path: Path, name: str) -> None:
    assert done_otherwise(name) in " ".join(invoke("train", f"--{name}=1").stderr.split())
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"optimizer:\n  {name}: 1\n")
    (problem,) = load_config(Layers([str(recipe)]), Config).problems
    assert problem.fix == done_otherwise(name)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tiny-ppo-cpu"], [("unexpected-word", "--recipe tiny-ppo-cpu")]),
        (["tiny-ppo"], [("unexpected-word", "--recipe tiny-ppo-cpu")]),
        (["mine.yaml"], [("unexpected-word", "--recipe mine.yaml")]),
        (["--lr", "1", "2"], [("unexpected-word", None)]),
        (["--learning-rate", "1", "--foo", "--bar=2"], [("unknown-option", "use --lr"), ("unknown-option", None)] * 1
         + [("unknown-option", None)]),
        (["--prompt-data", "a", "--prompt-data", "b", "c"], [("unexpected-word", None)]),
        (["--rm-type=math", "--rm-type", "exact"], [("option-given-twice", "keep one --rm-type")]),
        (["--save", "--async-save", "--lr"],
         [("value-missing", "give --save a value, or drop it"), ("value-missing", None)]),
        (["num_rollout=3", "optimizer.lr=1e-4", "actor.optim.lr=1e-4"],
         [("unexpected-word", "--num-rollout 3"), ("unexpected-word", "--set optimizer.lr=1e-4"),
          ("unexpected-word", "give it after the option that it is for; see `relax train --help`")]),
        (["—recipe", "tiny-ppo-cpu"], [("unknown-option", "use --recipe")]),
    ],
)  # fmt: skip
def test_words_are_judged_all_at_once(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], expected: list[tuple[str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").touch()
    for command in ("train", "validate-config"):
        shown = invoke(command, *words, "--format=json")
        problems = json.loads(shown.stdout)["problems"]
        assert shown.exit_code == 2
        assert [p["id"] for p in problems] == [rule for rule, _ in expected]
        assert all(fix is None or p["fix"] == fix for p, (_, fix) in zip(problems, expected, strict=True))


@pytest.mark.parametrize(
    "words",
    [
        ["--rollout-stop", "--end", "--rollout-stop", "-1"], ["--lr", "1e-5", "--lr", "1e-6"],
        ["--prompt-data", "a", "--prompt-data", "a"], ["--no-colocate", "--colocate"], ["--rollout-top-k", "-1"],
        ["--sglang-log-level", "info"], ["--eval-prompt-data", "a", "b", "--eval-prompt-data", "c", "d"],
    ],
)  # fmt: skip
def test_words_that_are_right_are_left_alone(invoke: Invoke, words: list[str]) -> None:
    shown = invoke("train", *words, "--show-config")
    assert shown.exit_code == 0, shown.output
