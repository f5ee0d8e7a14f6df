"""`relax train`: resolve and check a configuration, then hand it to the engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_cli.cli.console import Format, Output
from relax_cli.cli.finish import finish
from relax_cli.cli.options import with_options
from relax_cli.config.schema import Config
from relax_cli.preflight.resolve import Resolved, examine, resolve

if TYPE_CHECKING:
    from relax_cli.plugin.manager import Plugins

PANEL = "Configuration (layers, each overriding the ones before)"

Recipes = Annotated[
    list[str] | None,
    typer.Option(
        "--recipe",
        metavar="NAME|FILE",
        help="bundled recipe or YAML file (repeatable)",
        rich_help_panel=PANEL,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="YAML value (repeatable)", rich_help_panel=PANEL),
]
FormatOption = Annotated[Format, typer.Option("--format", help="form of the data on stdout", rich_help_panel=PANEL)]
ShowConfig = Annotated[
    bool,
    typer.Option(
        "--show-config",
        help="print the configuration and where each value is from, then stop",
        rich_help_panel=PANEL,
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="check everything, print the plan, then stop", rich_help_panel=PANEL)
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
        dry_run: DryRun = False,
        **flags: Any,
    ) -> None:
        """Train a model.

        Values come from: defaults < recipes, left to right < RELAX_* environment < --set < the flags below.
        Everything that can be known to be wrong is reported, all at once, before anything starts.
        """
        output = Output(fmt)
        ctx.find_root().obj = output
        layers = (recipe or (), os.environ, set_values or (), flags)
        if show_config:
            show(examine(plugins, *layers, skip_files=True), output)
            return
        from relax_cli.cli.validate import reading_progress, report

        if dry_run:
            raise typer.Exit(report(plugins, layers, output, here=True))
        with reading_progress(output) as progress:
            resolved = resolve(plugins, *layers, progress=progress, cluster_gpus=cluster_gpus)
        for warning in resolved.warnings:
            output.warn(warning)
        from relax_cli.engine.run import train as run

        finished = run(plugins, resolved, output.err)
        raise typer.Exit(finish(finished, output))

    return train


def cluster_gpus() -> int:
    """GPUs of the Ray cluster that the run would join."""
    from relax_cli.engine.ray.start import cluster_gpus

    return cluster_gpus()


def show(resolved: Resolved, output: Output) -> None:
    """Print a configuration with its origins: JSON, or YAML that is a recipe again."""
    data = resolved.dump()
    changes = [f"# changed: {c.option} from {c.before} to {c.after}, because {c.why}" for c in resolved.changes]
    output.result(data, "\n".join([*changes, *as_recipe(data["config"], resolved.origins)]))


def as_recipe(config: dict[str, dict[str, Any]], origins: dict[str, str]) -> list[str]:
    """A configuration as lines of a recipe, with the origin of each value as a comment."""
    # JSON scalars and flow collections are YAML.
    lines = []
    for section, values in config.items():
        lines.append(f"{section}:")
        rows = [(f"  {key}: {json.dumps(value)}", origins[f"{section}.{key}"]) for key, value in values.items()]
        width = max(len(text) for text, _ in rows)
        lines += [f"{text:<{width}}  # {origin}" for text, origin in rows]
    return lines
