"""`relax validate-config`: all that can be known about a run before anything starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from relax_cli.cli.console import LAYERS_PANEL, Format, FormatOption, output_of
from relax_cli.cli.options import Overrides, Recipes, ShowConfig, ShowOrigin, with_options
from relax_cli.cli.report import report, show
from relax_cli.config.layers import Layers
from relax_cli.config.schema import Config
from relax_cli.plugin.manager import Plugins

SkipFiles = Annotated[
    bool,
    typer.Option("--skip-files", help="leave out what needs the model and data files", rich_help_panel=LAYERS_PANEL),
]
Here = Annotated[
    bool,
    typer.Option("--here", help="what this machine lacks is an error, as for `train`", rich_help_panel=LAYERS_PANEL),
]


def validate_command(model: type[Config], plugins: Plugins) -> Callable[..., None]:
    """The command function, with an option for every field of the model."""

    @with_options(model)
    def validate_config(
        ctx: typer.Context,
        *,
        recipe: Recipes = None,
        set_values: Overrides = None,
        fmt: FormatOption = Format.TEXT,
        show_config: ShowConfig = False,
        show_origin: ShowOrigin = False,
        skip_files: SkipFiles = False,
        here: Here = False,
        **flags: Any,
    ) -> None:
        """Check a configuration without Ray or a GPU, and show what its run will do.

        The checks are those of `train`. All problems are reported together; exit code 0, or 2 where there are errors.
        """
        layers = Layers(recipe or (), os.environ, set_values or (), flags)
        output = output_of(ctx, fmt)
        if show_config:
            show(plugins, layers, output)
            return
        raise typer.Exit(report(plugins, layers, output, show_origin=show_origin, skip_files=skip_files, here=here))

    return validate_config
