"""Flags generated from the schema."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from relax_cli.cli.app import main
from relax_cli.cli.options import join_pairs
from relax_cli.config.model import base_type, flag, options_by_name
from relax_cli.config.schema import Config
from relax_cli.plugin.config_model import config_model
from relax_cli.plugin.manager import Plugins
from tests.support.cli_app import Invoke, built_in_plugins

FROZEN = Path(__file__).parent / "options.txt"


def option_flags(model: type[Config]) -> list[str]:
    """Every flag of the model, sorted, `--no-x` included."""
    options = options_by_name(model)
    switches = [name for name, (_, field) in options.items() if base_type(field) is bool]
    return sorted([*map(flag, options), *(flag(f"no_{name}") for name in switches)])


def test_option_names_do_not_change_by_accident(plugins: Plugins) -> None:
    """After a change that is meant, write the new list: `python -m tests.cli.test_options`."""
    assert option_flags(config_model(plugins.estimators().values())) == FROZEN.read_text().split()


@pytest.mark.parametrize(
    ("words", "joined"),
    [
        ("--eval-prompt-data a p --seed 1", "--eval-prompt-data a=p --seed 1"),
        ("--eval-prompt-data a=p q", "--eval-prompt-data a=p q"),
        (
            "--eval-prompt-data a g:t?s=1 --eval-prompt-data b q",
            "--eval-prompt-data a=g:t?s=1 --eval-prompt-data b=q",
        ),
        ("--eval-prompt-data a --seed 1", "--eval-prompt-data a --seed 1"),
        ("--eval-prompt-data a", "--eval-prompt-data a"),
        ("--eval-prompt-data", "--eval-prompt-data"),
        ("--eval-prompt-data=a=p --x", "--eval-prompt-data=a=p --x"),
    ],
)
def test_the_two_words_of_a_held_out_set_become_one(words: str, joined: str) -> None:
    assert join_pairs(words.split()) == joined.split()


def test_help_has_a_section_per_panel_with_defaults(invoke: Invoke) -> None:
    text = invoke("train", "--help").stdout
    for panel in ("Algorithm (Objective and advantages):", "Critic (The value model of PPO):", "Sapo ("):
        assert panel in text
    (gamma,) = (line for line in text.splitlines() if "--gamma " in line)
    assert gamma.split() == ["--gamma", "FLOAT", "discount", "factor", "per", "token", "[default:", "1.0]"]


@pytest.mark.parametrize("words", [("--help",), ("checkpoint", "--help"), ("plugins", "--help"), ("recipes", "-h")])
@pytest.mark.parametrize("columns", [80, 120])
def test_help_uses_the_terminal_and_cuts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], columns: int
) -> None:
    # Not with CliRunner, in which every terminal has 80 columns.
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(list(words)) == 0
    text = capsys.readouterr().out
    assert not any(line.endswith("...") for line in text.splitlines()[1:])
    widest = max(len(line) for line in text.splitlines())
    assert widest <= columns
    assert widest > 80 or columns == 80 or words[0] != "checkpoint"
    assert "relax train --recipe NAME --dry-run" in text or words != ("--help",)


def test_both_commands_show_the_configuration(invoke: Invoke) -> None:
    recipe = ("--recipe", "tiny-ppo-cpu", "--gamma", "0.5")
    shown = [invoke(command, *recipe, "--show-config") for command in ("train", "validate-config")]
    assert shown[0].stdout == shown[1].stdout
    assert "gamma: 0.5" in shown[0].stdout
    for command in ("train", "validate-config"):
        report = invoke(command, *recipe, "--show-origin")
        assert "gamma: 0.5" in report.stdout
        assert "roles, in the order of a step" in report.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("relax train --recipe tiny-p", "tiny-ppo-cpu"),
        ("relax train --typo x --recipe tiny-p", "tiny-ppo-cpu"),
        ("relax train --rm-type ma", "math"),
        ("relax train --advantage-estimator sa", "sapo"),
        ("relax train --device c", "cuda"),
        ("relax recipes show smol", "smollm2-135m-ppo-cpu"),
        ("relax plugins show sa", "sapo"),
    ],
)
def test_the_shell_completes_names(app: typer.Typer, words: str, expected: str) -> None:
    env = {"_RELAX_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = CliRunner().invoke(app, [], env=env, prog_name="relax")
    assert expected in done.stdout.split()


def test_help_shows_every_flag_whole_in_80_columns(
    invoke: Invoke, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = invoke("train", "--help").stdout
    assert max(len(line) for line in text.splitlines() if line.startswith(" ")) <= 80
    shown = {line.split()[0] for line in text.splitlines() if line.startswith("  --")}
    names = config_model(plugins.estimators().values())
    for name in option_flags(names):
        negated = f"--[no-]{name.removeprefix('--no-').removeprefix('--')}"
        assert name in shown or negated in shown


def test_help_keeps_square_brackets(invoke: Invoke) -> None:
    assert '{"role": [services, devices]}' in " ".join(invoke("train", "--help").stdout.split())


if __name__ == "__main__":
    FROZEN.write_text("\n".join(option_flags(config_model(built_in_plugins().estimators().values()))) + "\n")
