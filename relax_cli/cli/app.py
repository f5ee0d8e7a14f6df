"""The `relax` command: its sub-commands, and how every error ends."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from relax_cli.cli import checkpoint, recipes
from relax_cli.cli.console import Output, is_debug
from relax_cli.cli.doctor import doctor_command
from relax_cli.cli.options import ConfigCommand
from relax_cli.cli.plugins import plugins_app
from relax_cli.cli.quickstart import quickstart_command
from relax_cli.cli.train import train_command
from relax_cli.cli.validate import validate_command
from relax_cli.config.model import config_model
from relax_cli.config.schema import Config
from relax_cli.errors import ConfigError, ExitCode, RelaxError, Terminated

if TYPE_CHECKING:
    from relax_cli.plugin.manager import Plugins

HELP = "Reinforcement-learning post-training of language models."


class RelaxGroup(TyperGroup):
    """Ends every `RelaxError` of a command in its screen and exit code."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the command."""
        try:
            return super().invoke(ctx)
        except RelaxError as error:
            output = ctx.obj if isinstance(ctx.obj, Output) else Output()
            output.fail(error)
            raise typer.Exit(error.exit_code) from error


def build_app(plugins: Plugins) -> typer.Typer:
    """The application, with the options that the plugins add."""
    app = typer.Typer(
        cls=RelaxGroup,
        help=HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        # Plain help, like that of `train`: importing rich for its panels would take longer than all the rest.
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    app.command("quickstart")(quickstart_command(plugins))
    model = _model(plugins)
    app.command("train", cls=ConfigCommand)(train_command(model, plugins))
    app.command("validate-config", cls=ConfigCommand)(validate_command(model, plugins))
    app.command("doctor")(doctor_command(plugins))
    app.add_typer(plugins_app(plugins), name="plugins")
    app.add_typer(recipes.app, name="recipes")
    app.add_typer(checkpoint.app, name="checkpoint")
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run `relax` and return its exit code."""
    try:
        from relax_cli.plugin.manager import load_plugins

        build_app(load_plugins())(args=list(sys.argv[1:] if argv is None else argv), prog_name="relax")
    except SystemExit as end:
        return _exit_code(end)
    except RelaxError as error:
        Output().fail(error)
        return error.exit_code
    except KeyboardInterrupt:
        Output().note("interrupted before the first step was done; nothing is running any more")
        return ExitCode.INTERRUPTED
    except Terminated:
        return ExitCode.TERMINATED
    except Exception as error:  # noqa: BLE001 - the last frame: whatever is left is our bug, and is shown as one
        _bug(error)
    return ExitCode.FAILED


def _root(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="print the version and stop", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Reinforcement-learning post-training of language models."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"relax {version('relax-cli')}")
        raise typer.Exit()


def _model(plugins: Plugins) -> type[Config]:
    """The configuration model for the options of `train`."""
    try:
        return config_model(plugins.estimators().values())
    except ConfigError:
        # Two plugins that clash must not take `relax plugins list` away; `train` raises this when it runs.
        return Config


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return ExitCode.OK
    return end.code if isinstance(end.code, int) else ExitCode.FAILED


def _bug(error: Exception) -> None:
    output = Output()
    output.note(f"error: {type(error).__name__}: {error}")
    if is_debug():
        output.note("".join(traceback.format_exception(error)))
    else:
        output.note("  where     inside relax: this is a bug, not your doing")
        output.note("  fix       run the command again with RELAX_DEBUG=1 to see the traceback, and report it")
