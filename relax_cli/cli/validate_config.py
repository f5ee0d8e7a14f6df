"""`relax validate-config`: all that can be known about a run before anything starts."""

from __future__ import annotations

from typing import Annotated

from relax_cli.cli.checked_text import report
from relax_cli.cli.console import Output, layers_option
from relax_cli.cli.options import ShowOrigin
from relax_cli.config.layers import Layers
from relax_cli.errors import ExitCode
from relax_cli.plugin.manager import Plugins

SkipFiles = Annotated[bool, layers_option("--skip-files", help="leave out what needs the model and data files")]
Here = Annotated[bool, layers_option("--here", help="what this machine lacks is an error, as for `train`")]
Simulate = Annotated[
    bool,
    layers_option(
        "--simulate",
        help="run a training step of each role on tensors without memory, and show its peaks (minutes; no GPU)",
    ),
]


def validate_config(
    layers: Layers,
    output: Output,
    plugins: Plugins,
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
