"""`relax quickstart`: a tiny model, a task and a recipe in a folder, trained on this CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from relax_cli.cli.console import Format, Output
from relax_cli.cli.finish import finish

if TYPE_CHECKING:
    from relax_cli.plugin.manager import Plugins

Directory = Annotated[Path, typer.Argument(metavar="[DIR]", help="folder to write to")]
PrepareOnly = Annotated[bool, typer.Option("--prepare-only", help="write model, data and recipe, then stop")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="seed of weights, prompts and sampling")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="rollouts to train")]
Launcher = Annotated[Literal["ray", "local"], typer.Option("--launcher", help="as in `relax train`")]
FormatOption = Annotated[Format, typer.Option("--format", help="form of the data on stdout")]


def quickstart_command(plugins: Plugins) -> Callable[..., None]:
    """The command function."""

    def quickstart(
        ctx: typer.Context,
        directory: Directory = Path("quickstart"),
        prepare_only: PrepareOnly = False,
        seed: Seed = 1234,
        steps: Steps = 40,
        launcher: Launcher = "ray",
        fmt: FormatOption = Format.TEXT,
    ) -> None:
        """Teach a tiny model two-digit addition with PPO on this CPU, in a few minutes."""
        output = Output(fmt)
        ctx.find_root().obj = output
        if prepare_only:
            from relax_cli.quickstart.task import prepare

            prepare(directory, seed=seed, steps=steps)
            recipe = directory / "recipe.yaml"
            output.result(
                {"ok": True, "dir": str(directory), "recipe": str(recipe)},
                f"Wrote model, data and recipe to {directory}. Train:\n  relax train --recipe {recipe}",
            )
            return
        from relax_cli.quickstart.command import quickstart as run

        finished = run(plugins, directory, seed=seed, steps=steps, launcher=launcher, console=output.err)
        raise typer.Exit(finish(finished, output))

    return quickstart
