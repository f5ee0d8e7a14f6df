"""Sub-commands are imported when they are used, and look as if they always had been."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from relax_cli.cli.app import COMMANDS, build_app
from relax_cli.plugin.manager import Plugins
from tests.support.cli_app import MAIN, Invoke, Process


@pytest.fixture
def group(plugins: Plugins) -> Any:
    return typer.main.get_command(build_app(plugins))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_listed_with_its_helps_first_sentence(group: Any, name: str) -> None:
    command = group.commands[name]
    assert command.name == name
    assert COMMANDS[name].rstrip(".") == command.get_short_help_str(200).rstrip(".")


def test_help_lists_every_command_with_its_line(invoke: Invoke) -> None:
    shown = " ".join(invoke("--help").stdout.split())
    for name, summary in COMMANDS.items():
        assert f"{name} {summary}" in shown


@pytest.mark.parametrize("argv", [["--help"], ["--version"]])
def test_help_imports_neither_the_configuration_nor_a_plugin(process: Process, argv: list[str]) -> None:
    names = ("pydantic", "rich", "pluggy", "ruamel", "relax_ppo", "relax_cli.config.schema", "relax_cli.plugin.manager")
    code = f"print([m for m in {names!r} if m in sys.modules], file=sys.stderr)"
    done = process(MAIN.format(argv=argv) + code)
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_misspelt_command_gets_the_nearest_one(invoke: Invoke) -> None:
    shown = invoke("trian")
    assert shown.exit_code == 2
    assert "train" in shown.stderr


@pytest.mark.parametrize("name", ["plugins", "recipes", "checkpoint"])
def test_command_groups_have_help_and_no_completion_flags(invoke: Invoke, name: str) -> None:
    shown = invoke(name, "--help").stdout
    assert "list" in shown
    assert "--install-completion" not in shown


def test_commands_are_loaded_once(group: Any) -> None:
    assert group.commands["train"] is group.commands["train"]
    assert list(group.commands) == list(COMMANDS)
    assert len(group.commands) == len(COMMANDS)
    assert group.commands.get("trian") is None
