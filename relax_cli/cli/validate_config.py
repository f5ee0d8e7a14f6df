"""`relax validate-config`: all that can be known about a run before anything starts."""

from __future__ import annotations

from typing import Annotated

import typer

from relax_cli.cli.checked_text import report
from relax_cli.cli.console import LAYERS_PANEL, Output
from relax_cli.cli.options import ShowOrigin, config_command
from relax_cli.config.layers import Layers
from relax_cli.errors import ExitCode
from relax_cli.plugin.manager import Plugins

SkipFiles = Annotated[
    bool,
    typer.Option("--skip-files", help="leave out what needs the model and data files", rich_help_panel=LAYERS_PANEL),
]
Here = Annotated[
    bool,
    typer.Option("--here", help="what this machine lacks is an error, as for `train`", rich_help_panel=LAYERS_PANEL),
]
Simulate = Annotated[
    bool,
    typer.Option(
        "--simulate",
        help="run a training step of each role on tensors without memory, and show its peaks (minutes; no GPU)",
        rich_help_panel=LAYERS_PANEL,
    ),
]


def register(app: typer.Typer, plugins: Plugins) -> None:
    """Add the command to an application."""

    @config_command(app, "validate-config", plugins)
    def validate_config(
        layers: Layers,
        output: Output,
        *,
        show_origin: ShowOrigin = False,
        skip_files: SkipFiles = False,
        here: Here = False,
        simulate: Simulate = False,
    ) -> ExitCode:
        """Check a configuration without Ray or a GPU, and show what its run will do.

        The checks are those of `train`. All problems are reported together; exit code 0, or 2 where there are errors.
        """
        return report(
            plugins, layers, output, show_origin=show_origin, skip_files=skip_files, here=here, simulates=simulate
        )
