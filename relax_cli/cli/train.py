"""Commands that train or evaluate: `relax train`, `validate-config`, `quickstart` and `eval`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from relax_cli.checkpoint import layout
from relax_cli.cli.checked_text import as_dict, as_text, reading_progress, simulation_lines
from relax_cli.cli.checkpoint_commands import chosen_checkpoint
from relax_cli.cli.console import Output, layers_option, path_argument
from relax_cli.cli.options import ShowOrigin
from relax_cli.cli.text import problems_data, problems_text
from relax_cli.config.layers import Layers
from relax_cli.engine.simulate import simulate as simulate_step
from relax_cli.errors import ConfigError, ExitCode
from relax_cli.plugin.manager import Plugins
from relax_cli.preflight.check_eval import OPTIONS, check_evaluation
from relax_cli.preflight.check_run import check_run
from relax_cli.quickstart.task import TaskName, prepare

DryRun = Annotated[bool, layers_option("--dry-run", help="check everything, print the plan, then stop")]
SkipFiles = Annotated[bool, layers_option("--skip-files", help="leave out what needs the model and data files")]
Here = Annotated[bool, layers_option("--here", help="what this machine lacks is an error, as for `train`")]
Simulate = Annotated[
    bool,
    layers_option(
        "--simulate",
        help="run a training step of each role on tensors without memory, and show its peaks (minutes; no GPU)",
    ),
]
Directory = Annotated[Path, path_argument("[DIR]", "folder to write to")]
PrepareOnly = Annotated[bool, typer.Option("--prepare-only", help="write model, data and recipe, then stop")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="seed of weights, prompts and sampling")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="rollouts to train")]
TaskOption = Annotated[TaskName, typer.Option("--task", help="add two numbers, or have a calculator add them")]
Launcher = Annotated[Literal["ray", "local"], typer.Option("--launcher", help="as in `relax train`")]
Data = Annotated[list[str] | None, layers_option("--data", metavar="NAME=PATH", help="a set of prompts (repeatable)")]


def train(
    layers: Layers, output: Output, plugins: Plugins, show_origin: ShowOrigin = False, dry_run: DryRun = False
) -> ExitCode:
    """Train a model.

    \b
    relax train --recipe tiny-ppo-cpu --num-rollout 20 --save runs/actor
    relax train --hf-checkpoint DIR --prompt-data FILE.jsonl --rm-type math
    relax train --recipe mine.yaml --custom-rm-path reward.py:judge --dry-run

    Values come from: defaults < recipes, left to right < RELAX_* environment < --set < the flags below.
    Everything that can be known to be wrong is reported together, before anything starts.
    """
    if dry_run or show_origin:
        return validate_config(layers, output, plugins, show_origin, here=True)
    return launch(plugins, layers, output)


def launch(plugins: Plugins, layers: Layers, output: Output) -> ExitCode:
    """Check a run and train; shows its warnings before and its results at the end."""
    with reading_progress(output) as progress:
        checked = check_run(plugins, layers, progress=progress, cluster_gpus=cluster_gpus).require_valid()
        from relax_cli.engine.run import resume_lines, train_with_restarts
        from relax_cli.engine.summary import closing_lines, summary_dict
    output.warn(*checked.warnings)
    run = train_with_restarts(plugins, checked, output.err)
    output.result(summary_dict(run), "\n".join(closing_lines(run)))
    if run.ended_by is None:
        return ExitCode.OK
    if output.is_json:
        for line in resume_lines(run.config, run.resume):
            output.note(line)
    return ExitCode.INTERRUPTED if isinstance(run.ended_by, KeyboardInterrupt) else ExitCode.TERMINATED


def cluster_gpus() -> int:
    """GPUs of the Ray cluster that the run would join."""
    from relax_cli.engine.ray.start import cluster_gpus

    return cluster_gpus()


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
    try:
        with reading_progress(output) as progress:
            checked = check_run(plugins, layers, skip_files=skip_files, here=here, progress=progress)
    except ConfigError as error:
        # There is no configuration at all, but programs get the object they expect.
        empty: dict[str, Any] = {"changes": [], "config": {}, "origins": {}, "plan": None}
        output.result({"ok": False, "problems": problems_data(error.problems), **empty}, problems_text(error.problems))
        return ExitCode.USAGE
    data, more = as_dict(checked), ""
    if simulate and not checked.errors:
        with output.err.status("simulating") as screen:
            data["simulation"] = simulate_step(checked, screen.update)
        more = "\n".join(simulation_lines(data["simulation"], checked.plan))
    # The last lines are what a person at a terminal sees first.
    text = as_text(checked, show_origin=show_origin, problems_last=output.is_terminal)
    output.result(data, f"{more}\n\n{text}".strip() if output.is_terminal else f"{text}\n{more}".strip())
    return ExitCode.USAGE if checked.errors else ExitCode.OK


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
        f"Wrote model, data and recipe to {directory}\nTrain:\n  relax train --recipe {shlex.quote(recipe)}",
    )
    return ExitCode.OK


def eval(layers: Annotated[Layers, OPTIONS], output: Output, plugins: Plugins, data: Data = None) -> ExitCode:
    """Evaluate a model or a checkpoint on held-out sets, without a trainer.

    \b
    relax eval --hf-checkpoint DIR --data heldout=FILE.jsonl --label-key answer --rm-type math
    relax eval --recipe RUN_DIR/config.json --load SAVE_DIR
    relax eval --recipe RUN_DIR/config.json --load SAVE_DIR/iter_0000040 --eval-temperature 0

    With the configuration of a run its numbers are those of the run's own evaluation. Samples and numbers go to
    --run-dir, by default a new folder runs/eval-TIME.
    """
    sets = layers.flags.get("eval_prompt_data") or []
    flags = {**layers.flags, "eval_prompt_data": [*sets, *data] if data else layers.flags.get("eval_prompt_data")}
    load = layers.flags.get("load")
    checkpoint = None if load is None else chosen_checkpoint(Path(load), None)
    if checkpoint is not None and not (layers.recipes or flags.get("hf_checkpoint")):
        origin = layout.read_meta(checkpoint).extra.get("origin")
        flags["hf_checkpoint"] = origin.get("hf_checkpoint") if isinstance(origin, dict) else None
    layers = Layers(layers.recipes, layers.env, layers.overrides, flags)
    with reading_progress(output) as progress:
        checked = check_evaluation(plugins, layers, progress).require_valid()
    output.warn(*checked.warnings)
    from relax_cli.engine.evaluate import evaluate

    found, run_dir = evaluate(plugins, checked, checkpoint, lambda text: output.note(f"{text} ..."))
    output.result(
        {"ok": True, "run_dir": str(run_dir), "evaluations": [e.dict() for e in found]},
        "\n".join([*(e.text for e in found), f"Samples   {run_dir / 'evals'}"]),
    )
    return ExitCode.OK
