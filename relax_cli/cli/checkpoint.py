"""`relax checkpoint`: what a run would resume from, and whether checkpoints are whole. Reads, never changes."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from relax_cli.checkpoint import align, layout
from relax_cli.checkpoint.fingerprint import folder_differences, model_shape
from relax_cli.checkpoint.prune import size_of
from relax_cli.checkpoint.resume import ResumeReport, examine_resume, was_saved_beside_a_critic
from relax_cli.checkpoint.side import Side
from relax_cli.cli.checked_text import decision_dict
from relax_cli.cli.checkpoint_commands import (
    align_trackers,
    export,
    model_folder,
    prune_checkpoints,
)
from relax_cli.cli.console import Output, path_argument, path_option
from relax_cli.config.text import table
from relax_cli.errors import ExitCode, Problem, ResumeError
from relax_cli.models.hybrid import read_any_spec
from relax_cli.models.spec import indivisible_sizes
from relax_cli.preflight.completion import beside, critic_folders, has_checkpoints

Folder = Annotated[Path, path_argument("DIR", "a save folder")]
KEEPS_COMPLETE = frozenset({"resume-wrong-role", "resume-critic-lost"})
"""Problems of a checkpoint that is whole."""


def check_resume(
    output: Output,
    load: Annotated[str, path_option("--load", "the actor's save folder")],
    critic_load: Annotated[
        str | None,
        path_option("--critic-load", "the critic's save folder, where the run has one; LOAD-critic when unset"),
    ] = None,
    critic_init_from_actor: Annotated[
        bool,
        typer.Option(
            "--critic-init-from-actor", help="where the critic has no state, it may start from the actor's backbone"
        ),
    ] = False,
    hf_checkpoint: Annotated[
        str | None, path_option("--hf-checkpoint", "compare model and tokenizer with this folder's")
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            "--tensor-model-parallel-size",
            min=1,
            help="check that the model can be shared out; as it was saved when unset",
        ),
    ] = None,
    save: Annotated[
        str | None, path_option("--save", "--save of the run: if --load is the same, it may be new")
    ] = None,
    critic_save: Annotated[str | None, path_option("--critic-save", "--critic-save of the run, likewise")] = None,
    deep: Annotated[bool, typer.Option("--deep", help="compare the hash of every file")] = False,
) -> ExitCode:
    """Show what a run with these folders would start from; exit code 3 if it would be refused.

    As in a run, the critic's folder is LOAD-critic where there is one, or else --load; a critic is looked for if one of
    its options is given, its folder is there, or the actor's checkpoint was saved with one. What belongs to the run
    itself - data, estimator, number of rollouts - is checked by `relax validate-config` with the options of the run.
    """
    from_actor, there = critic_init_from_actor, has_checkpoints(beside(load))
    has_critic = critic_load is not None or from_actor or there or was_saved_beside_a_critic(load)
    if has_critic:
        critic_load, critic_save = critic_folders(load, save, critic_load, critic_save, from_actor=from_actor)
    report = examine_resume(
        load,
        critic_load,
        has_critic=has_critic,
        critic_init_from_actor=from_actor,
        deep=deep,
        save=save,
        critic_save=critic_save,
    )
    model, misfits = model_fit(report, hf_checkpoint, tensor_parallel)
    report = report.refused(misfits)
    best = None if (folder := report.sides[0].folder) is None else layout.read_best(folder)
    data = as_json(report, model, best)
    output.result(data, as_text(report, data, best, fits=not misfits))
    output.warn(*report.warnings)
    if not report.problems:
        return ExitCode.OK
    if not output.is_json:
        output.fail(ResumeError(report.problems))
    return ExitCode.CANNOT_RESUME


def list_checkpoints(output: Output, folder: Folder) -> None:
    """List the checkpoints of a save folder: iteration, size, age, and whether each is complete."""
    align.require_save_folder("DIR", folder)
    tracker = layout.read_tracker(folder)
    best = layout.read_best(folder)
    named = {"latest": tracker.iteration, "best": None if best is None else best.iteration}
    rows = [describe(folder, iteration, named) for iteration in layout.list_iterations(folder)]
    cells = [
        (
            str(row["iteration"]),
            row["role"],
            f"{row['bytes'] / 1e6:.1f} MB",
            f"{row['age_seconds'] / 3600:.1f} h",
            row["reason"] or "complete",
            " ".join(f"<- {name}" for name in named if row[name]),
        )
        for row in rows
    ]
    text = table(("iteration", "role", "size", "age", "state", ""), cells) if rows else f"no checkpoints in {folder}"
    output.result(rows, text if best is None else f"{text}\n\n{best}")
    if tracker.problem is not None:
        output.note(f"warning: {tracker.problem}")


def verify(output: Output, folder: Folder) -> ExitCode:
    """Compare every file of every checkpoint in a save folder with its recorded hash; exit code 3 on a difference."""
    align.require_save_folder("DIR", folder)
    found = {iteration: damages(folder, iteration, deep=True) for iteration in layout.list_iterations(folder)}
    ok = bool(found) and not any(found.values())
    data = {"ok": ok, "iterations": [{"iteration": i, "problems": problems} for i, problems in found.items()]}
    lines = [f"{i:>9}  {'; '.join(problems) or 'every hash is right'}" for i, problems in found.items()]
    output.result(data, "\n".join(lines) or f"no checkpoints in {folder}")
    return ExitCode.OK if ok else ExitCode.CANNOT_RESUME


def describe(folder: Path, iteration: int, named: dict[str, layout.Iteration]) -> dict[str, Any]:
    """One checkpoint as a row of `list`."""
    checkpoint = layout.iteration_folder(folder, iteration)
    problems = damages(folder, iteration, deep=False)
    return {
        "iteration": iteration,
        "role": "-" if problems else layout.read_meta(checkpoint).role,
        "bytes": size_of(checkpoint),
        "age_seconds": round(time.time() - checkpoint.stat().st_mtime),
        "complete": not problems,
        "reason": "; ".join(problems),
        **{name: iteration == found for name, found in named.items()},
    }


def damages(folder: Path, iteration: int, *, deep: bool) -> list[str]:
    """What is wrong with a checkpoint, in words."""
    try:
        return layout.damages(layout.iteration_folder(folder, iteration), deep=deep)
    except ResumeError as error:
        return [error.problems[0].message]


def model_fit(
    report: ResumeReport, hf_checkpoint: str | None, tensor_parallel: int | None
) -> tuple[dict[str, Any], tuple[Problem, ...]]:
    """What was compared, and what does not fit: model and tokenizer, and the model's sizes to the ranks.
    Raises ConfigError: there is no such model, or its config.json is unusable."""
    meta = report.sides[0].meta
    saved = None if meta is None else meta.parallel
    size = tensor_parallel or (saved or {}).get("tensor_parallel")
    shape = None
    problems: dict[str, Problem] = {}
    if hf_checkpoint is not None:
        folder = model_folder(hf_checkpoint, "give an existing folder")
        read_any_spec(folder)
        shape = model_shape(folder)
        for side in report.sides:
            if side.meta is not None and side.checkpoint is not None:
                for found in folder_differences(folder, side.meta, side.checkpoint, hf_checkpoint):
                    problems.setdefault(found.id, found)
    known = shape or (meta.extra.get("model_shape") if meta is not None else None)
    resized = saved is not None and size != saved.get("tensor_parallel")
    fit = indivisible_sizes(known, size, resized=resized) if known is not None and size is not None else []
    model = {"hf_checkpoint": hf_checkpoint, "saved_parallel": saved, "tensor_model_parallel_size": size}
    return model, (*problems.values(), *fit)


def as_json(report: ResumeReport, model: dict[str, Any], best: layout.Best | None) -> dict[str, Any]:
    """The object of `check-resume --format json`."""
    decision = decision_dict(report.decision)
    sides = {side.role: side_json(side) for side in report.sides}
    return {
        **decision,
        "ok": not report.problems,
        "actor": sides["actor"],
        "critic": sides.get("critic"),
        "loads": {role: decision[role] for role in ("actor", "critic") if decision[role] is not None},
        "model": model,
        "best": None if best is None else asdict(best),
        "problems": [asdict(problem) for problem in report.problems],
        "fix": report.problems[0].fix if report.problems else None,
    }


def side_json(side: Side) -> dict[str, Any]:
    """One role of the object."""
    tracker = layout.Tracker(None) if side.folder is None else layout.read_tracker(side.folder)
    is_complete = side.checkpoint is not None and (side.problem is None or side.problem.id in KEEPS_COMPLETE)
    return {
        "path": None if side.folder is None else str(side.folder),
        "tracker": tracker.iteration if tracker.problem is None else tracker.problem,
        "iteration": side.iteration,
        "complete": is_complete,
        "role": side.meta.role if side.meta is not None and is_complete else None,
    }


def as_text(report: ResumeReport, data: dict[str, Any], best: layout.Best | None, *, fits: bool) -> str:
    """The table and the verdict of `check-resume`."""
    rows = []
    for side in report.sides:
        shown = data[side.role]
        found = "weights only" if side.weights_only else "none" if side.iteration is None else str(side.iteration)
        rows.append((side.role, str(shown["path"]), found, "yes" if shown["complete"] else "no", shown["role"] or "-"))
    lines = [table(("role", "folder", "iteration", "complete", "saved by"), rows), ""]
    saved, compared = data["model"]["saved_parallel"], data["model"]["hf_checkpoint"]
    if saved:
        lines.append("saved with " + ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in saved.items()))
    if compared is not None and fits and saved is not None:
        lines.append(f"model and tokenizer are those of {compared}")
    lines.append(report.decision.text)
    if best is not None:
        lines.append(f"{best}; it is kept, and --keep-best continues with it")
    if report.decision.verdict == "weights-only" and report.decision.critic is None:
        lines.append("a critic, where the run has one, takes the same weights and a new value head")
    return "\n".join(lines)


SUB_COMMANDS = {
    "align": align_trackers,
    "prune": prune_checkpoints,
    "export-hf": export,
    "check-resume": check_resume,
    "list": list_checkpoints,
    "verify": verify,
}
