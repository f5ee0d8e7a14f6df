"""`relax eval`: held-out sets without a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from relax_cli.checkpoint import layout
from relax_cli.cli.checked_text import reading_progress
from relax_cli.cli.checkpoint_commands import chosen_checkpoint
from relax_cli.cli.console import Output, layers_option
from relax_cli.config.layers import Layers
from relax_cli.errors import ExitCode
from relax_cli.plugin.manager import Plugins
from relax_cli.preflight.check_eval import OPTIONS, check_evaluation

Data = Annotated[list[str] | None, layers_option("--data", metavar="NAME=PATH", help="a set of prompts (repeatable)")]


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
    for warning in checked.warnings:
        output.warn(warning)
    from relax_cli.engine.evaluate import evaluate

    found, run_dir = evaluate(plugins, checked, checkpoint, lambda text: output.note(f"{text} ..."))
    output.result(
        {"ok": True, "run_dir": str(run_dir), "evaluations": [e.dict() for e in found]},
        "\n".join([*(e.text for e in found), f"Samples   {run_dir / 'evals'}"]),
    )
    return ExitCode.OK
