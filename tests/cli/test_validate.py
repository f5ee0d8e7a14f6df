"""`relax validate-config` and `relax train --dry-run`."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from relax_cli.cli import train
from relax_cli.cli.recipes import recipe_schema
from relax_cli.config.model import options_by_name
from relax_cli.config.recipes import bundled_recipes
from relax_cli.plugin.config_model import config_model
from relax_cli.plugin.manager import Plugins
from tests.support.cli_app import HEAVY, MAIN, Invoke, Process

TINY = ("validate-config", "--recipe", "tiny-ppo-cpu")
SECRET = "hunter2"


@pytest.fixture(autouse=True)
def quickstart_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> Path:
    """A folder in which the bundled recipe `tiny-ppo-cpu` finds its model and data."""
    monkeypatch.chdir(tmp_path)
    assert invoke("quickstart", "--prepare-only").exit_code == 0
    return tmp_path


def report(invoke: Invoke, *words: str, code: int = 0, command: tuple[str, ...] = TINY) -> dict[str, Any]:
    result = invoke(*command, *words, "--format", "json")
    assert result.exit_code == code, result.output
    shown: dict[str, Any] = json.loads(result.stdout)
    return shown


def problem_ids(shown: dict[str, Any]) -> list[str]:
    return [problem["id"] for problem in shown["problems"]]


def test_the_json_object_has_the_documented_form(invoke: Invoke) -> None:
    shown = report(invoke, "--kl-coef", "0.5")
    assert set(shown) == {"ok", "problems", "changes", "config", "origins", "plan"}
    assert shown["ok"] is True
    assert set(shown["plan"]) == {"roles", "placement", "gpus", "steps", "memory"}
    (problem,) = shown["problems"]
    assert {"id", "severity", "option", "where", "message", "fix"} <= set(problem)
    assert (problem["id"], problem["severity"], problem["where"]) == ("ppo-kl-off", "warning", "--kl-coef")
    changes = {change["option"]: change for change in shown["changes"]}
    assert {"option", "from", "to", "why"} == set(changes["--kl-coef"])
    assert (changes["--kl-coef"]["from"], changes["--kl-coef"]["to"]) == (0.5, 0.0)
    assert shown["config"]["algorithm"]["kl_coef"] == 0.0
    assert shown["origins"]["algorithm.kl_coef"] == "--kl-coef"


def test_strict_makes_the_warning_an_error(invoke: Invoke) -> None:
    shown = report(invoke, "--kl-coef", "0.5", "--strict", code=2)
    assert [problem["severity"] for problem in shown["problems"]] == ["error"]


def test_validate_reports_the_problems_of_train_errors_first(invoke: Invoke) -> None:
    words = ("--rm-type", "exakt", "--num-steps-per-rollout", "3", "--kl-coef", "0.5", "--hf-checkpoint", "gone")
    shown = report(invoke, *words, "--here", code=2)
    assert shown["ok"] is False
    severities = [problem["severity"] for problem in shown["problems"]]
    assert severities == sorted(severities)
    assert {"reward-unknown", "batch-arithmetic", "model-folder-missing", "ppo-kl-off"} == set(problem_ids(shown))
    train = invoke("train", "--recipe", "tiny-ppo-cpu", *words, "--format", "json")
    assert train.exit_code == 2
    assert problem_ids(json.loads(train.stdout)) == problem_ids(shown)


def test_a_value_that_cannot_be_read_hides_nothing_else(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = report(invoke, "--lr", "fast", "--seed", "x", "--rm-type", "exakt", "--save", "a", code=2)
    assert set(shown) == {"ok", "problems", "changes", "config", "origins", "plan"}
    assert problem_ids(shown) == ["invalid-value", "invalid-value", "reward-unknown"]
    assert shown["plan"]["steps"]["rollouts"] == 40
    assert report(invoke, "--rollout-batch-size", "many", code=2)["plan"] is None


UNREAD = [
    ("resource", "'{oops'", "resource-json"),
    ("advantage_estimator", "${GONE}", "recipe-variable"),
    ("hf_checkpoint", "${GONE}/m", "recipe-variable"),
    ("prompt_data", "${GONE}/x.jsonl", "recipe-variable"),
    ("save", "${GONE}/save", "recipe-variable"),
    ("load", "${GONE}/load", "recipe-variable"),
    ("rm_type", "${GONE}", "recipe-variable"),
    ("num_rollout", "${GONE}", "recipe-variable"),
    ("rollout_batch_size", "0", "invalid-value"),
    ("global_batch_size", "0", "invalid-value"),
    ("n_samples_per_prompt", "0", "invalid-value"),
    ("strict", "'yes'", "invalid-value"),
    ("device", "gpu", "invalid-value"),
    ("launcher", "slurm", "invalid-value"),
    ("eval_prompt_data", "[1]", "invalid-value"),
    ("use_kl_loss", "'yes'", "invalid-value"),
    ("run_dir", "${GONE}/run", "recipe-variable"),
]


@pytest.mark.parametrize(("option", "text", "rule"), UNREAD)
def test_an_unread_value_is_one_problem_without_follow_ups(
    invoke: Invoke, plugins: Plugins, option: str, text: str, rule: str
) -> None:
    section = options_by_name(config_model(plugins.estimators().values()))[option][0]
    Path("bad.yaml").write_text(f"{section}:\n  {option}: {text}\n")
    shown = report(invoke, "--recipe", "bad.yaml", "--gamma", "2", code=2)
    assert sorted(problem_ids(shown)) == sorted([rule, "invalid-value"])
    train = invoke("train", "--recipe", "tiny-ppo-cpu", "--recipe", "bad.yaml", "--gamma", "2", "--format", "json")
    assert problem_ids(json.loads(train.stdout)) == problem_ids(shown)


def test_an_unknown_estimator_is_one_problem_without_a_plan(invoke: Invoke) -> None:
    shown = report(invoke, "--advantage-estimator", "pppo", code=2)
    assert (problem_ids(shown), shown["plan"]) == (["unknown-estimator"], None)


def test_a_role_without_resources_is_a_problem_without_a_plan(invoke: Invoke) -> None:
    shown = report(invoke, "--resource", '{"actor": [1, 1], "rollout": [1, -1]}', code=2)
    assert {"resource-negative", "ppo-needs-critic", "ppo-needs-advantages"} <= set(problem_ids(shown))
    assert shown["plan"] is None


def test_text_has_the_four_parts_the_diff_and_the_plan(invoke: Invoke) -> None:
    shown = invoke(*TINY, "--kl-coef", "0.5", "--rm-type", "exakt")
    assert shown.exit_code == 2
    assert shown.stdout.startswith(
        "not valid: 1 error, 1 warning\n"
        "error: there is no reward 'exakt'  [reward-unknown]\n"
        "  where     --rm-type\n"
        "  got       exakt\n"
        "  expected  code, exact, f1, format, json_schema, math, multiple_choice,\n"
        "            reasoning_gym, regex, remote\n"
        "  fix       --rm-type exact\n"
        "warning: "
    )
    assert "  - --kl-coef 0.5\n  + --kl-coef 0.0  (" in shown.stdout
    assert "80 of the critic, 70 of the\n" in shown.stdout or "80 of the critic, 70 of the actor" in shown.stdout


def test_text_fits_80_columns_and_has_no_escape_codes(invoke: Invoke) -> None:
    words = (
        "--save",
        "a",
        "--critic-save",
        "b",
        "--resource",
        '{"actor": [1, 3], "rollout": [1, 2]}',
        "--kl-coef",
        "1",
    )
    many = (
        "--use-kl-loss",
        "--critic-lr",
        "1e-5",
        "--value-clip",
        "0.3",
        "--num-critic-only-steps",
        "3",
        "--lambd",
        "0",
    )
    grpo = ("validate-config", "--recipe", "tiny-grpo-cpu", "--critic-updates-per-step", "2", "--min-lr", "1", *many)
    for command in ((*TINY, *words), grpo):
        shown = invoke(*command, "--show-origin")
        report, _, rest = shown.stdout.partition("\nconfiguration\n")
        lines = [*report.splitlines(), *rest.partition("\n\n")[2].splitlines()]
        assert [line for line in lines if len(line) > 80 and "  fix " not in line] == []
        assert "\x1b" not in shown.stdout
        assert shown.stderr == ""


def test_show_origin_prints_every_value_with_its_layer(invoke: Invoke) -> None:
    text = invoke(*TINY, "--gamma", "0.9", "--show-origin", env={"RELAX_LAMBD": "0.8"}).stdout
    lines = {line.split(":")[0].strip(): line for line in text.splitlines() if "  # " in line}
    assert lines["gamma"].endswith("# --gamma")
    assert lines["lambd"].endswith("# RELAX_LAMBD")
    assert lines["seed"].endswith("# default")
    assert "tiny-ppo-cpu.yaml:" in lines["num_rollout"]


def test_what_the_machine_lacks_is_a_note_with_here_an_error(invoke: Invoke) -> None:
    many = ("--device", "cuda", "--resource")
    eight = '{"actor": [1, 512], "critic": [1, 512], "rollout": [1, 512], "advantages": [1, 0]}'
    words = (*many, eight, "--rollout-batch-size", "1024")
    shown = report(invoke, *words)
    assert shown["problems"] == []
    (note,) = (n for n in shown["plan"]["placement"]["notes"] if n["id"] != "sglang-missing")
    assert note["id"] in ("no-cuda-device", "too-few-gpus")
    assert shown["plan"]["gpus"]["needed"] == 512
    assert "note, about this machine: " in invoke(*TINY, *words).stdout
    found = problem_ids(report(invoke, *words, "--here", code=2))
    assert [rule for rule in found if rule != "sglang-missing"] == [note["id"]]


def test_skip_files_judges_the_configuration_alone(invoke: Invoke, tmp_path: Path) -> None:
    words = ("--hf-checkpoint", "gone", "--prompt-data", "gone.jsonl", "--eval-prompt-data", "held", "gone.jsonl")
    missing = {"model-folder-missing", "prompt-data-file-missing"}
    assert missing <= set(problem_ids(report(invoke, *words, "--here", code=2)))
    assert not missing & set(problem_ids(report(invoke, *words)))
    shown = report(invoke, *words, "--skip-files")
    assert shown["problems"] == []
    assert shown["plan"]["memory"]["per_process"] == []
    assert shown["plan"]["steps"]["rollouts"] == 40


def test_checkpoints_that_do_not_fit_together_are_a_problem(invoke: Invoke) -> None:
    Path("a").mkdir()
    Path("a/latest_checkpointed_iteration.txt").write_text("7")
    shown = report(invoke, "--load", "a", "--save", "a", "--critic-save", "c", code=2)
    assert "resume-unreadable" in problem_ids(shown)


def test_bad_rows_are_counted_and_the_first_named(invoke: Invoke) -> None:
    rows = ['{"input": "1+1=", "label": "2"}', *["{oops"] * 25, '{"input": "", "label": "2"}']
    Path("bad.jsonl").write_text("\n".join(rows))
    syntax, empty = report(invoke, "--prompt-data", "bad.jsonl", code=2)["problems"]
    assert (syntax["id"], syntax["where"], syntax["count"]) == ("prompt-data-row", "bad.jsonl:2", 25)
    assert syntax["places"] == [f"bad.jsonl:{line}" for line in range(2, 7)]
    assert (empty["where"], "count" in empty) == ("bad.jsonl:27", False)
    shown = invoke("validate-config", "--recipe", "tiny-ppo-cpu", "--prompt-data", "bad.jsonl").output
    assert "bad.jsonl:2, :3, :4, :5, :6 and 20 more" in shown


def test_prompts_are_tokenised_and_counted_against_the_limits(invoke: Invoke) -> None:
    assert report(invoke)["plan"]["steps"]["longest_prompt"] == 6
    shown = report(invoke, "--rollout-max-prompt-len", "5", code=2)
    assert set(problem_ids(shown)) == {"prompt-too-long"}
    assert shown["problems"][0]["where"] == "quickstart/data/train.jsonl:1"
    assert shown["problems"][0]["got"] == "6 tokens"
    assert {"longer-than-positions"} == set(problem_ids(report(invoke, "--rollout-max-response-len", "60", code=2)))


def test_a_missing_chat_template_is_found_before_the_launch(invoke: Invoke) -> None:
    assert set(problem_ids(report(invoke, "--apply-chat-template", code=2))) == {"prompt-encoding"}


def test_labels_are_tried_with_the_chosen_reward(invoke: Invoke) -> None:
    rows = ({"input": "1+1=", "label": label} for label in ("2", r"\frac{1}{2}", "no idea what", " "))
    Path("labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ("--prompt-data", "labels.jsonl", "--eval-prompt-data", "h", "labels.jsonl")
    found = report(invoke, *data, "--rm-type", "exact", code=2)["problems"]
    assert {(p["id"], p["where"]) for p in found} == {("label-unusable", "labels.jsonl:4")}
    found = report(invoke, *data, "--rm-type", "math", code=2)["problems"]
    # Words are compared as text; only a blank label has nothing to compare with.
    assert sorted((p["id"], p["where"]) for p in found) == [
        ("label-unusable", "labels.jsonl:4"),
        ("label-words", "labels.jsonl:3"),
    ]
    found = report(invoke, *data, "--rm-type", "reasoning_gym", code=2)["problems"]
    assert {p["id"] for p in found} == {"label-metadata"}


def test_dry_run_prints_the_plan_and_starts_nothing(invoke: Invoke) -> None:
    shown = report(invoke, "--dry-run", command=("train", "--recipe", "tiny-ppo-cpu"))
    checked = report(invoke, "--here")
    for plan in (shown["plan"], checked["plan"]):
        # Others write to the disk meanwhile.
        assert plan["memory"].pop("disk_bytes_free") > 0
    assert shown == checked
    assert not Path("runs").exists()
    refused = (
        "--dry-run",
        "--device",
        "cuda",
        "--resource",
        '{"actor": [1, 512], "critic": [1, 512], "rollout": [1, 512]}',
    )
    assert report(invoke, *refused, command=("train", "--recipe", "tiny-ppo-cpu"), code=2)["ok"] is False


@pytest.mark.parametrize(
    "command", [TINY, (*TINY, "--format", "json"), (*TINY, "--show-origin"), ("train", "--recipe", "tiny-ppo-cpu")]
)
def test_secrets_are_in_no_output(invoke: Invoke, command: tuple[str, ...]) -> None:
    planted = (
        "--hf-checkpoint", f"https://me:{SECRET}@models.example/m", "--run-dir", f"s3://me:{SECRET}@bucket/run",
        "--prompt-data", f"https://me:{SECRET}@data.example/x.jsonl?token={SECRET}", "--set", f"token={SECRET}",
        "--set", f"run.api_key={SECRET}", "--custom-rm-path", f"https://me:{SECRET}@x/reward.py:score",
    )  # fmt: skip
    for given in (planted, planted[:6], planted[-2:]):
        shown = invoke(*command, *given, env={"RELAX_API_KEY": SECRET})
        assert shown.exit_code == 2
        assert SECRET not in shown.stdout + shown.stderr
        shown = invoke(*command, *given)
        assert SECRET not in shown.stdout + shown.stderr


def test_validating_imports_nothing_heavy_and_takes_a_second(process: Process, tmp_path: Path) -> None:
    light = [name for name in HEAVY if name != "numpy"]
    code = MAIN.format(argv=list(TINY)) + f"print([m for m in {light!r} if m in sys.modules], file=sys.stderr)"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process(code).stderr == "[]\n"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU time, which a busy machine does not stretch without end as it does the clock: half a second on an idle one.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5


def test_bundled_recipes_fit_the_schema_for_editors(plugins: Plugins) -> None:
    schema = recipe_schema(config_model(plugins.estimators().values()))
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    for path in bundled_recipes().values():
        assert list(validator.iter_errors(YAML(typ="safe", pure=True).load(path))) == []
    assert list(validator.iter_errors({"batch": {"num_rollout": "${N}"}, "rollout": {"rollout_stop": "x"}})) == []
    for wrong in (
        {"batch": {"num_rollout": 0}},
        {"batch": {"nun_rollout": 1}},
        {"bath": {}},
        {"run": {"strict": "yes"}},
    ):
        assert len(list(validator.iter_errors(wrong))) == 1


def test_the_schema_is_one_json_object(invoke: Invoke) -> None:
    assert json.loads(invoke("recipes", "schema").stdout)["title"] == "relax recipe"


def test_a_simulation_is_shown_next_to_the_plan(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"actor": {"train": {"weights": 2_000_000, "logits": 9_000_000}}}
    monkeypatch.setattr(train, "simulate_step", lambda checked, status: peaks)
    assert report(invoke, "--simulate")["simulation"] == peaks
    text = invoke(*TINY, "--simulate").stdout
    assert "actor, train  11.0 MB" in text
    assert "actor, train: logits 9.0 MB, weights 2.0 MB" in text


def test_the_heaviest_simulated_stage_stands_next_to_the_plan(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"actor stage 0": {"train": {"weights": 2_000_000}}, "actor stage 1": {"train": {"logits": 9_000_000}}}
    monkeypatch.setattr(train, "simulate_step", lambda checked, status: peaks)
    text = invoke(*TINY, "--simulate").stdout
    assert re.search(r"actor stage 0, train +2.0 MB +-\n", text)
    assert re.search(r"actor stage 1, train +9.0 MB +\d+.\d MB\n", text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--recipe", "qwen35-9B-8xgpu-ppo"), "Megatron-Bridge"),
        ((*TINY[1:], "--hf-checkpoint", "nowhere"), "not known"),
    ],
)
def test_what_cannot_be_built_here_is_not_simulated(invoke: Invoke, words: tuple[str, ...], said: str) -> None:
    result = invoke("validate-config", *words, "--simulate", "--format", "json")
    assert result.exit_code != 0
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem["id"] == "not-simulated"
    assert said in problem["message"]


def test_what_is_not_valid_is_told_and_not_simulated(invoke: Invoke) -> None:
    result = invoke("validate-config", "--advantage-estimator", "none", "--simulate", "--format", "json")
    assert result.exit_code == 2
    found = {problem["id"] for problem in json.loads(result.stdout)["problems"]}
    assert "unknown-estimator" in found
    assert "not-simulated" not in found
