"""What is around a command's call: `--format`, and its streams. Data go to stdout, everything else to stderr."""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeAlias

import typer

from relax_cli.cli.text import problem_lines, problems_data
from relax_cli.config.redact import scrubbed
from relax_cli.config.text import printable, with_program
from relax_cli.errors import ConfigError, ExitCode, Problem, RelaxError
from relax_cli.plugin.stdout import stdout_as_stderr

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from relax_cli.plugin.manager import Plugins

layers_option = partial(typer.Option, rich_help_panel="Configuration (layers, each overriding the ones before)")
Function: TypeAlias = Callable[..., ExitCode | None]


class Format(StrEnum):
    """Form of the data on stdout."""

    TEXT = "text"
    JSON = "json"


class Output:
    """The two streams of one command. With `Format.JSON`, stdout gets exactly one object."""

    def __init__(self, fmt: Format = Format.TEXT, stdout: TextIO | None = None) -> None:
        self.format = fmt
        self._stdout = stdout

    @property
    def is_json(self) -> bool:
        """Whether stdout is for a program."""
        return self.format is Format.JSON

    @property
    def is_terminal(self) -> bool:
        """Whether a person sees stdout."""
        return not self.is_json and (self._stdout or sys.stdout).isatty()

    @cached_property
    def err(self) -> Console:
        """rich on stderr, for progress and logs: colour only on a terminal and without `NO_COLOR`."""
        from relax_cli.cli.screen import Screen

        return Screen(stderr=True, force_terminal=sys.stderr.isatty(), soft_wrap=True)

    def result(self, data: object, text: str) -> None:
        """Print the command's data on stdout: `data` as JSON, or `text`."""
        shown = json.dumps(data, indent=2, default=str) if self.is_json else printable(with_program(text))
        print(shown, file=self._stdout or sys.stdout, flush=True)

    def show(self, data: object, *pictures: RenderableType) -> None:
        """Print the command's data on stdout: `data` as JSON, or as pictures of rich."""
        if self.is_json:
            self.result(data, "")
            return
        from relax_cli.cli.screen import Screen

        screen = Screen(file=self._stdout or sys.stdout, markup=False)
        for picture in pictures:
            screen.print(picture)

    def note(self, text: str) -> None:
        """One plain line of progress on stderr."""
        self.err.print(scrubbed(text), markup=False)

    def fail(self, error: RelaxError) -> None:
        """Every problem of an error on stderr, errors last; also as data where stdout is for a program."""
        self.warn(*sorted(error.problems, key=lambda p: p.severity == "error"))
        for note in getattr(error, "__notes__", ()):
            self.note(note)
        if self.is_json:
            self.result({"ok": False, "problems": problems_data(error.problems)}, "")
        if is_debug():
            self.err.print(scrubbed("".join(traceback.format_exception(error))), markup=False)

    def warn(self, *problems: Problem) -> None:
        """Warnings or errors on stderr."""
        for problem in problems:
            first, *rest = problem_lines(problem, width=None)
            colour = "red" if problem.severity == "error" else "yellow"
            self.err.print(f"[bold {colour}]{problem.severity}[/]", end="")
            self.err.print(first.removeprefix(problem.severity), markup=False)
            for line in rest:
                self.err.print(line, markup=False, style="bold" if line.startswith("  fix ") else None)


FormatOption = Annotated[Format, layers_option("--format", help="form of the data on stdout")]


def output_of(ctx: typer.Context, fmt: Format) -> Output:
    """The output of a command; errors that end it are shown there, and nothing else gets to stdout."""
    # Of the whole program: errors are shown when the command itself has ended.
    output = Output(fmt, ctx.find_root().with_resource(stdout_as_stderr()))
    ctx.find_root().obj = output
    return output


def expanded(parameter: typer.CallbackParam, value: Any) -> Any:
    """A path, or several, with `~` and variables expanded, as `relax train` does it.
    Raises ConfigError: a variable is not set."""
    if isinstance(value, list):
        return [expanded(parameter, one) for one in value]
    if value is None:
        return None
    from relax_cli.config.values import expand_path, unset_variable

    text, missing = expand_path(str(value), os.environ)
    if missing:
        raise ConfigError(unset_variable(missing[0], parameter.opts[0], "", str(value)))
    return type(value)(text)


def path_option(name: str, help: str, metavar: str = "DIR") -> Any:
    """An option that is a path."""
    return typer.Option(name, metavar=metavar, help=help, callback=expanded)


def path_argument(metavar: str, help: str) -> Any:
    """An argument that is a path."""
    return typer.Argument(metavar=metavar, help=help, callback=expanded)


def is_debug() -> bool:
    """Whether `RELAX_DEBUG=1` asks for tracebacks."""
    return os.environ.get("RELAX_DEBUG", "0") not in ("", "0")


def command_of(function: Function, plugins: Plugins) -> Callable[..., None]:
    """The command of a function.

    It may return the exit code. Its parameters are arguments and options of the command, but for three: with `output`
    the command has `--format`, with `layers` all options of the configuration, or those of `Annotated[Layers, OPTIONS]`
    (`options.config_command`); `plugins` are the installed ones.
    """
    takes_plugins = "plugins" in inspect.signature(function).parameters

    def command(ctx: typer.Context, *, fmt: FormatOption = Format.TEXT, **words: Any) -> None:
        given = {"plugins": plugins} if takes_plugins else {}
        raise typer.Exit(function(output=output_of(ctx, fmt), **given, **words) or ExitCode.OK)

    context, fmt, _ = inspect.signature(command, eval_str=True).parameters.values()
    return as_typer_reads_it(command, [context, *own_parameters(function), fmt], function)


def own_parameters(function: Function) -> list[inspect.Parameter]:
    """Arguments and options that a function declares itself."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return [p.replace(kind=p.KEYWORD_ONLY) for p in parameters if p.name not in ("layers", "output", "plugins")]


def as_typer_reads_it(
    command: Callable[..., None], parameters: Sequence[inspect.Parameter], function: Function
) -> Callable[..., None]:
    """The command with these parameters, and with the help of the function."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = function.__doc__
    return command
