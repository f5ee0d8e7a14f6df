"""`relax train`: check a run, then launch it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from relax_cli.cli.console import LAYERS_PANEL, Format, FormatOption, Output, output_of
from relax_cli.cli.options import Overrides, Recipes, ShowConfig, ShowOrigin, with_options
from relax_cli.cli.report import reading_progress, report, show
from relax_cli.config.layers import Layers
from relax_cli.config.schema import Config
from relax_cli.errors import ExitCode
from relax_cli.plugin.manager import Plugins
from relax_cli.preflight.check_run import check_run

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="check everything, print the plan, then stop", rich_help_panel=LAYERS_PANEL)
]


def train_command(model: type[Config], plugins: Plugins) -> Callable[..., None]:
    """The command function, with an option for every field of the model."""

    @with_options(model)
    def train(
        ctx: typer.Context,
        *,
        recipe: Recipes = None,
        set_values: Overrides = None,
        fmt: FormatOption = Format.TEXT,
        show_config: ShowConfig = False,
        show_origin: ShowOrigin = False,
        dry_run: DryRun = False,
        **flags: Any,
    ) -> None:
        """Train a model.

        \b
        relax train --recipe tiny-ppo-cpu --num-rollout 20 --save runs/actor
        relax train --hf-checkpoint DIR --prompt-data FILE.jsonl --rm-type math
        relax train --recipe mine.yaml --custom-rm-path reward.py:judge --dry-run

        Values come from: defaults < recipes, left to right < RELAX_* environment < --set < the flags below.
        Everything that can be known to be wrong is reported together, before anything starts.
        """
        output = output_of(ctx, fmt)
        layers = Layers(recipe or (), os.environ, set_values or (), flags)
        if show_config:
            show(plugins, layers, output)
        elif dry_run or show_origin:
            raise typer.Exit(report(plugins, layers, output, show_origin=show_origin, here=True))
        else:
            raise typer.Exit(launch(plugins, layers, output))

    return train


def launch(plugins: Plugins, layers: Layers, output: Output) -> ExitCode:
    """Check a run and train; shows its warnings before and its results at the end.

    Raises:
        RelaxError: the run may not start, or it failed.
    """
    with reading_progress(output) as progress:
        checked = check_run(plugins, layers, progress=progress, cluster_gpus=cluster_gpus).require_valid()
    for warning in checked.warnings:
        output.warn(warning)
    from relax_cli.engine.run import train
    from relax_cli.engine.summary import closing_lines, next_lines, summary_dict

    run = train(plugins, checked, output.err)
    output.result(summary_dict(run), "\n".join(closing_lines(run)))
    if run.ended_by is None:
        return ExitCode.OK
    if output.is_json:
        for line in next_lines(run):
            output.note(line)
    return ExitCode.INTERRUPTED if isinstance(run.ended_by, KeyboardInterrupt) else ExitCode.TERMINATED


def cluster_gpus() -> int:
    """GPUs of the Ray cluster that the run would join."""
    from relax_cli.engine.ray.start import cluster_gpus

    return cluster_gpus()
