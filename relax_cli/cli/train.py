"""`relax train` and `relax validate-config`: what is known about a run before it starts, and its launch."""

from __future__ import annotations

from typing import Annotated

from relax_cli.cli.checked_text import reading_progress, report
from relax_cli.cli.console import Output, layers_option
from relax_cli.cli.options import ShowOrigin
from relax_cli.config.layers import Layers
from relax_cli.errors import ExitCode
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
        return report(plugins, layers, output, show_origin=show_origin, here=True)
    return launch(plugins, layers, output)


def launch(plugins: Plugins, layers: Layers, output: Output) -> ExitCode:
    """Check a run and train; shows its warnings before and its results at the end.
    Raises RelaxError: the run may not start, or it failed."""
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
    return report(
        plugins, layers, output, show_origin=show_origin, skip_files=skip_files, here=here, simulates=simulate
    )
