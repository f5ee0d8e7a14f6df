"""`relax train` up to the point where something would be launched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_cli.config.layers import Layers
from relax_cli.plugin.manager import Plugins
from relax_cli.preflight.check_run import check_run
from tests.support.cli_app import Invoke

PPO = ("--recipe", "tiny-ppo-cpu")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_show_config_prints_values_with_the_layer_each_is_from(invoke: Invoke) -> None:
    result = invoke(
        "train", *PPO, "--set", "optimizer.lr=2e-4", "--gamma", "0.9", "--show-config", "--format", "json",
        env={"RELAX_LAMBD": "0.8"},
    )  # fmt: skip
    assert result.exit_code == 0
    shown = json.loads(result.stdout)
    assert (shown["config"]["optimizer"]["lr"], shown["origins"]["optimizer.lr"]) == (2e-4, "--set")
    assert (shown["config"]["algorithm"]["gamma"], shown["origins"]["algorithm.gamma"]) == (0.9, "--gamma")
    assert (shown["config"]["algorithm"]["lambd"], shown["origins"]["algorithm.lambd"]) == (
        0.8,
        "RELAX_LAMBD",
    )
    assert shown["origins"]["batch.num_rollout"].endswith("tiny-ppo-cpu.yaml:39")
    assert shown["origins"]["run.seed"] == "default"


def test_the_shown_text_is_a_recipe_of_the_configuration(invoke: Invoke, plugins: Plugins) -> None:
    Path("again.yaml").write_text(invoke("train", *PPO, "--rollout-stop", "a b", "--show-config").stdout)
    again = check_run(plugins, Layers(["again.yaml"]), skip_files=True)
    expected = check_run(plugins, Layers([PPO[1]], {}, [], {"rollout_stop": ["a b"]}), skip_files=True)
    assert again.dump()["config"] == expected.dump()["config"]


def test_show_config_names_what_the_estimator_changed(invoke: Invoke) -> None:
    shown = invoke("train", *PPO, "--kl-coef", "0.5", "--show-config").stdout
    assert "# changed: --kl-coef from 0.5 to 0.0, because " in shown
    assert "  kl_coef: 0.0 " in shown


@pytest.mark.parametrize(
    "words",
    [
        ("held", "a.jsonl", "--eval-prompt-data", "other", "b.jsonl"),
        ("held=a.jsonl", "--eval-prompt-data", "other=b.jsonl"),
    ],
)
def test_eval_prompt_data_takes_a_name_and_a_path_and_repeats(invoke: Invoke, words: tuple[str, ...]) -> None:
    result = invoke("train", "--eval-prompt-data", *words, "--show-config", "--format", "json")
    assert json.loads(result.stdout)["config"]["eval"]["eval_prompt_data"] == [
        "held=a.jsonl",
        "other=b.jsonl",
    ]


def test_train_reports_all_problems_and_writes_nothing(invoke: Invoke, empty_folder: Path) -> None:
    result = invoke(
        "train", "--advantage-estimator", "pppo", "--rm-type", "exakt", "--run-dir", "run",
        "--resource", '{"actor": [1, 1]}', "--hf-checkpoint", "gone", "--prompt-data", "gone.jsonl",
    )  # fmt: skip
    assert result.exit_code == 2
    assert result.stdout == ""
    for rule in ("unknown-estimator", "reward-unknown", "resource-missing-role", "model-folder-missing"):
        assert f"[{rule}]" in result.stderr
    assert (
        "error: there is no reward 'exakt'  [reward-unknown]\n"
        "  where     --rm-type\n"
        "  got       exakt\n"
        "  expected  code, exact, f1, format, json_schema, math, multiple_choice, reasoning_gym, regex, remote\n"
        "  fix       --rm-type exact\n"
    ) in result.stderr
    assert "Traceback" not in result.stderr
    assert list(empty_folder.iterdir()) == []


def test_a_problem_says_which_layer_the_value_is_from(invoke: Invoke) -> None:
    result = invoke("train", *PPO, env={"RELAX_RM_TYPE": "exakt"})
    assert "  where     --rm-type from RELAX_RM_TYPE\n" in result.stderr


def test_problems_are_one_object_on_stdout_for_programs(invoke: Invoke) -> None:
    result = invoke("train", "--format", "json")
    assert result.exit_code == 2
    shown = json.loads(result.stdout)
    assert shown["ok"] is False
    assert {"id", "severity", "option", "where", "message", "fix"} <= set(shown["problems"][0])
    assert "model-missing" in {p["id"] for p in shown["problems"]}


def test_wrong_resource_json_is_refused_with_an_example(invoke: Invoke) -> None:
    result = invoke("train", *PPO, "--resource", "{actor: 1}")
    assert result.exit_code == 2
    assert "[resource-json]" in result.stderr
    assert "  got       {actor: 1}\n" in result.stderr
    assert """  fix       --resource '{"actor": [1, 1],""" in result.stderr


def test_a_number_that_is_none_is_refused_like_any_other_problem(invoke: Invoke) -> None:
    result = invoke("train", "--lr", "fast", "--rollout-batch-size", "0", "--device", "gpu", "--show-config")
    assert result.exit_code == 2
    assert result.stderr.count("[invalid-value]") == 3


@pytest.mark.parametrize(
    "words", [["--recipe", "no-such"], ["--recipe", "typo.yaml"], ["--set", "optimizer.lrr=1"], ["--set", "lr"]]
)
def test_what_cannot_be_read_is_not_shown_as_defaults(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("typo.yaml").write_text("optimizer: {lrr: 1}\n")
    shown = invoke("train", *words, "--show-config")
    assert (shown.exit_code, shown.stdout) == (2, "")


def test_ppo_switches_kl_off_with_a_warning_strict_an_error(invoke: Invoke) -> None:
    kl = ("train", *PPO, "--use-kl-loss", "--kl-coef", "0.1")
    assert invoke(*kl).stderr.count("warning: ") == 1
    strict = invoke(*kl, "--strict")
    assert strict.exit_code == 2
    assert "warning: " not in strict.stderr


def test_ppo_drops_kl_terms_and_says_what_changed_and_why(invoke: Invoke, plugins: Plugins) -> None:
    flags = {"use_kl_loss": True, "kl_loss_coef": "0.1", "kl_coef": "0.1", "ref_load": "nowhere"}
    resolved = check_run(plugins, Layers([PPO[1]], {}, [], flags))
    # The recipe's model and data are not here; nothing else is in the way.
    assert {p.option for p in resolved.errors} <= {"--hf-checkpoint", "--prompt-data", "--eval-prompt-data"}
    assert [(p.id, p.option) for p in resolved.warnings] == [("ppo-kl-off", "--use-kl-loss")]
    assert not resolved.config.algorithm.needs_reference
    assert "reference" not in resolved.config.parallel.resource
    assert "reference" not in plugins.service_graph(resolved.config)

    shown = invoke("train", *PPO, "--use-kl-loss", "--kl-coef", "0.1", "--show-config", "--format", "json").stdout
    changes = {change["option"]: change for change in json.loads(shown)["changes"]}
    assert (changes["--use-kl-loss"]["before"], changes["--use-kl-loss"]["after"]) == (True, False)
    assert (changes["--kl-coef"]["before"], changes["--kl-coef"]["after"]) == (0.1, 0.0)
    assert all(change["why"] for change in changes.values())
    assert json.loads(shown)["config"]["algorithm"]["kl_coef"] == 0.0


def test_a_kl_term_deploys_a_reference_shaped_like_the_actor(plugins: Plugins) -> None:
    kl = {"advantage_estimator": "grpo", "kl_coef": "0.1", "resource": '{"actor": [1, 4], "rollout": [1, 2]}'}
    resolved = check_run(plugins, Layers([], {}, [], kl), skip_files=True)
    assert resolved.config.parallel.resource["reference"] == (1, 4)
    (change,) = resolved.changes
    assert change.option == "--resource"
    given = {**kl, "resource": '{"actor": [1, 4], "rollout": [1, 2], "reference": [1, 2]}'}
    resolved = check_run(plugins, Layers([], {}, [], given), skip_files=True)
    assert resolved.config.parallel.resource["reference"] == (1, 2)
    assert resolved.changes == ()
    assert plugins.service_graph(resolved.config).names == ("rollout", "reference", "actor")


def test_an_unknown_flag_is_a_usage_error(invoke: Invoke) -> None:
    assert invoke("train", "--no-such-flag").exit_code == 2


def test_a_run_folder_in_use_is_refused_before_any_write(invoke: Invoke, empty_folder: Path) -> None:
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text("{}\n")
    result = invoke("train", *PPO, "--run-dir", "run")
    assert result.exit_code == 2
    assert "[run-dir-in-use]" in result.stderr
    assert [p.name for p in empty_folder.rglob("*")] == ["run", "metrics.jsonl"]
