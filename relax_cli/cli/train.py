"""`relax train` and `relax validate-config`: what is known about a run before it starts, and its launch."""

from __future__ import annotations

from typing import Annotated, Any

from relax_cli.cli.checked_text import as_dict, as_text, reading_progress, simulation_lines
from relax_cli.cli.console import Output, layers_option
from relax_cli.cli.options import ShowOrigin
from relax_cli.cli.text import problems_data, problems_text
from relax_cli.config.layers import Layers
from relax_cli.engine.simulate import simulate as simulate_step
from relax_cli.errors import ConfigError, ExitCode
from relax_cli.plugin.manager import Plugins
from relax_cli.preflight.check_run import check_run

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
    for warning in checked.warnings:
        output.warn(warning)

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
