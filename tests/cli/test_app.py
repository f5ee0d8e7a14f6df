"""How commands end: exit codes, screens, and the small commands."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relax_cli.cli.app import build_app, main
from relax_cli.config.layers import Layers
from relax_cli.errors import ConfigError, EnvironmentFault, Problem, RelaxError, ResumeError, RunError
from relax_cli.plugin.manager import GROUP, Plugins
from relax_cli.preflight.check_run import check_run
from tests.support.cli_app import Invoke

PROBLEM = Problem(id="some-rule", message="something is wrong", fix="do this", got="a", expected="b", option="--x")


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(("kind", "code"), [(RunError, 1), (ConfigError, 2), (ResumeError, 3), (EnvironmentFault, 4)])
def test_every_error_has_its_exit_code_and_four_parts(
    kind: type[RelaxError], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("relax_cli.cli.recipes.bundled_recipes", raising(kind(PROBLEM)))
    assert main(["recipes", "list"]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "error: something is wrong  [some-rule]\n  where     --x\n  got       a\n  expected  b\n  fix       do this\n"
    )


def test_an_error_in_json_form_is_the_one_object_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("relax_cli.cli.recipes.bundled_recipes", raising(RunError(PROBLEM)))
    assert main(["recipes", "list", "--format", "json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["ok"], shown["problems"][0]["id"]) == (False, "some-rule")


def test_an_unexpected_exception_is_a_short_screen_that_owns_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("relax_cli.cli.recipes.bundled_recipes", raising(ZeroDivisionError("oops")))
    assert main(["recipes", "list"]) == 1
    shown = capsys.readouterr().err
    assert "error: ZeroDivisionError: oops" in shown
    assert "this is a bug" in shown
    assert "RELAX_DEBUG=1" in shown
    assert "Traceback" not in shown


def test_a_full_disk_behind_stdout_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["recipes", "list"]) == 1
    shown = capsys.readouterr().err
    assert "[system-refused]" in shown
    assert "No space left on device" in shown


@pytest.mark.parametrize("words", [["train", "--recipe", "--help"], ["train", "--nonsense", "-h"]])
def test_help_is_shown_wherever_it_is_asked_for(invoke: Invoke, words: list[str]) -> None:
    shown = invoke(*words)
    assert (shown.exit_code, shown.stdout.startswith("Usage:")) == (0, True)


def with_note(error: Exception) -> Exception:
    error.add_note("Resume with this")
    return error


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (OSError(24, "Too many open files", "f"), "ulimit -n"),
        (OSError(27, "File too large"), "ulimit -f"),
        (MemoryError(), "--micro-batch-size"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp]\nDefaultCPUAllocator: not enough memory"), "--micro-batch-size"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "--micro-batch-size"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (RuntimeError("anything else"), "report it"),
        (OSError(28, "No space left on device"), "see to the disk"),
    ],
)
def test_a_limit_of_the_machine_is_no_bug_of_ours(
    error: Exception, fix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("relax_cli.cli.recipes.bundled_recipes", raising(with_note(error)))
    assert main(["recipes", "list"]) == 1
    shown = capsys.readouterr().err
    assert fix in shown
    assert ("this is a bug" in shown) == (fix == "report it")
    assert ("[system-refused]" in shown) == (fix != "report it")
    assert "Resume with this" in shown, "what a run adds to its failure"


@pytest.mark.parametrize("error", [ZeroDivisionError("oops"), RunError(PROBLEM)])
def test_relax_debug_shows_the_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RELAX_DEBUG", "1")
    monkeypatch.setattr("relax_cli.cli.recipes.bundled_recipes", raising(error))
    assert main(["recipes", "list"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("relax_cli.cli.recipes.bundled_recipes", raising(KeyboardInterrupt()))
    assert main(["recipes", "list"]) == 130


@pytest.mark.parametrize("argv", [["trian"], ["train", "--nope"], ["recipes", "list", "--format", "xml"]])
def test_usage_errors_are_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().out == ""


def test_plugins_list_shows_a_broken_plugin_with_its_reason() -> None:
    found = Plugins([EntryPoint("ppo", "relax_ppo", GROUP), EntryPoint("bad", "no_such_module", GROUP)])
    app = build_app(found)
    rows = json.loads(CliRunner().invoke(app, ["plugins", "list", "--format", "json"]).stdout)
    by_name = {row["name"]: row for row in rows}
    assert set(rows[0]) == {"name", "kind", "distribution", "version", "status", "reason", "hooks"}
    assert by_name["ppo"]["status"] == "ok"
    assert "relax_estimators" in by_name["ppo"]["hooks"]
    assert by_name["bad"]["status"] == "broken"
    text = CliRunner().invoke(app, ["plugins", "list"]).stdout
    (line,) = (line for line in text.splitlines() if line.startswith("bad"))
    assert by_name["bad"]["reason"] in line


def test_two_plugins_with_one_estimator_refuse_to_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import relax_ppo\nfrom relax_cli import hookimpl\n\n@hookimpl\ndef relax_estimators():\n"
    (tmp_path / "second_ppo.py").write_text(source + "    return relax_ppo.relax_estimators()\n")
    monkeypatch.syspath_prepend(tmp_path)
    app = build_app(Plugins([EntryPoint("ppo", "relax_ppo", GROUP), EntryPoint("ppo2", "second_ppo", GROUP)]))
    assert CliRunner().invoke(app, ["plugins", "list"]).exit_code == 0
    refused = CliRunner().invoke(app, ["train", "--num-rollout", "1"])
    assert refused.exit_code == 2
    assert "[duplicate-estimator]" in refused.stderr


def test_recipes_are_listed_by_first_line_and_shown_whole(invoke: Invoke) -> None:
    listed = invoke("recipes", "list").stdout
    assert re.search("^tiny-ppo-cpu +PPO on the quickstart's two-digit addition", listed, re.MULTILINE)
    shown = invoke("recipes", "show", "tiny-ppo-cpu").stdout
    assert shown.startswith("# PPO on")
    assert "advantage_estimator: ppo" in shown
    missing = invoke("recipes", "show", "tiny-ppo")
    assert missing.exit_code == 2
    assert "use --recipe tiny-ppo-cpu" in missing.stderr


def test_quickstart_can_only_prepare(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("quickstart", "demo", "--prepare-only", "--format", "json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["recipe"] == "demo/recipe.yaml"
    checked = invoke("train", "--recipe", "demo/recipe.yaml", "--show-config", "--format", "json")
    assert json.loads(checked.stdout)["config"]["model"]["hf_checkpoint"] == "demo/model"


def test_a_second_quickstart_is_told_how_to_train_again(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke("quickstart", "my demo", "--prepare-only").exit_code == 0
    for role in ("actor", "critic"):
        Path("my demo/checkpoints", role, "iter_0000040").mkdir(parents=True)
        Path("my demo/checkpoints", role, "latest_checkpointed_iteration.txt").write_text("40")
    shown = json.loads(invoke("quickstart", "my demo", "--format", "json").stdout)
    _, _, command = shown["problems"][0]["fix"].partition("relax train ")
    again = invoke("validate-config", *shlex.split(command))
    assert again.exit_code == 0, again.stdout


def test_the_quickstart_and_its_recipe_pass_every_check(
    invoke: Invoke, plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke("quickstart", "--prepare-only").exit_code == 0
    for recipe in ("quickstart/recipe.yaml", "tiny-ppo-cpu"):
        assert check_run(plugins, Layers([recipe])).problems == ()


def test_a_configuration_survives_its_command_line(plugins: Plugins, invoke: Invoke) -> None:
    flags = {"gamma": "0.5", "colocate": False, "rollout_stop": ["a b", "c"], "eval_prompt_data": ["h=x"]}
    resolved = check_run(
        plugins, Layers(["tiny-ppo-cpu"], {"RELAX_LR": "1e-3"}, ["run.seed=3"], flags), skip_files=True
    )
    again = invoke("train", *resolved.command, "--show-config", "--format", "json")
    assert json.loads(again.stdout)["config"] == resolved.dump()["config"], shlex.join(resolved.command)


def test_the_config_hash_ignores_only_folders_of_the_run(plugins: Plugins) -> None:
    def hashed(*overrides: str) -> str:
        return check_run(plugins, Layers(["tiny-ppo-cpu"], {}, overrides), skip_files=True).config_hash

    assert hashed() == hashed("run.run_dir=a", "checkpoint.load=b", "critic.critic_save=c")
    assert hashed() != hashed("optimizer.lr=1e-3")
