"""Flags generated from the schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_cli.cli.options import join_pairs, option_flags
from relax_cli.plugin.config_model import config_model
from relax_cli.plugin.manager import Plugins
from tests.support.cli_app import Invoke, built_in_plugins

FROZEN = Path(__file__).parent / "options.txt"


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
    for panel in ("Algorithm (What is optimised):", "Critic (The value model of PPO):", "Sapo ("):
        assert panel in text
    (gamma,) = (line for line in text.splitlines() if "--gamma " in line)
    assert gamma.split() == ["--gamma", "FLOAT", "discount", "factor", "per", "token", "[default:", "1.0]"]


def test_help_shows_every_flag_whole_in_80_columns(
    invoke: Invoke, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = invoke("train", "--help").stdout
    assert max(len(line) for line in text.splitlines() if line.startswith(" ")) <= 80
    shown = {line.split()[0] for line in text.splitlines() if line.startswith("  --")}
    names = config_model(plugins.estimators().values())
    for flag in option_flags(names):
        negated = f"--[no-]{flag.removeprefix('--no-').removeprefix('--')}"
        assert flag in shown or negated in shown


def test_help_keeps_square_brackets(invoke: Invoke) -> None:
    assert '{"role": [services, devices]}' in " ".join(invoke("train", "--help").stdout.split())


if __name__ == "__main__":
    FROZEN.write_text("\n".join(option_flags(config_model(built_in_plugins().estimators().values()))) + "\n")
