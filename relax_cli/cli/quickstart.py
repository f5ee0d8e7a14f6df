"""`relax quickstart`: a tiny model, a task and a recipe in a folder, trained on this CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from relax_cli.cli.console import Output
from relax_cli.cli.train import launch
from relax_cli.config.layers import Layers
from relax_cli.errors import ExitCode
from relax_cli.plugin.manager import Plugins
from relax_cli.quickstart.task import TaskName, prepare

Directory = Annotated[Path, typer.Argument(metavar="[DIR]", help="folder to write to")]
PrepareOnly = Annotated[bool, typer.Option("--prepare-only", help="write model, data and recipe, then stop")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="seed of weights, prompts and sampling")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="rollouts to train")]
TaskOption = Annotated[TaskName, typer.Option("--task", help="add two numbers, or have a calculator add them")]
Launcher = Annotated[Literal["ray", "local"], typer.Option("--launcher", help="as in `relax train`")]


def quickstart(
    output: Output,
    plugins: Plugins,
    directory: Directory = Path("quickstart"),
    prepare_only: PrepareOnly = False,
    seed: Seed = 1234,
    steps: Steps = 40,
    task: TaskOption = "addition",
    launcher: Launcher = "ray",
) -> ExitCode:
    """Teach a tiny model to add, or to use a tool, with PPO on this CPU, in a few minutes."""
    with output.err.status(f"writing model, data and recipe to {escape(str(directory))}"):
        prepare(directory, seed=seed, steps=steps, task=task)
    recipe = str(directory / "recipe.yaml")
    if not prepare_only:
        return launch(plugins, Layers([recipe], os.environ, (), {"launcher": launcher}), output)
    output.result(
        {"ok": True, "dir": str(directory), "recipe": recipe},
        f"Wrote model, data and recipe to {directory}\nTrain:\n  relax train --recipe {recipe}",
    )
    return ExitCode.OK
