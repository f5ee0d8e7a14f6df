"""A function as a command: what is around its call.

A function may return the exit code. Its parameters are arguments and options of the command, but for three: with
`output` it has `--format`, with `layers` all options of the configuration (or those of `Annotated[Layers, OPTIONS]`);
`plugins` are the installed ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import typer

from relax_cli.cli.console import Format, FormatOption, output_of
from relax_cli.errors import ExitCode
from relax_cli.plugin.manager import Plugins

Function: TypeAlias = Callable[..., ExitCode | None]


def command_of(function: Function, plugins: Plugins) -> Callable[..., None]:
    """The command of a function that takes an `output` and no `layers`."""
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
