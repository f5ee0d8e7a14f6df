"""`relax checkpoint`: what a run would resume from, and whether checkpoints are whole. Reads, never changes."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from relax_cli.checkpoint import layout
from relax_cli.checkpoint.resume import ResumeReport, Side, examine_resume, was_saved_beside_a_critic
from relax_cli.cli.console import Format, Output, table
from relax_cli.errors import ExitCode, ResumeError

app = typer.Typer(no_args_is_help=True, help="Checkpoints: what a run would resume from, and whether they are whole.")

FormatOption = Annotated[Format, typer.Option("--format", help="form of the data on stdout")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="a save folder")]
Load = Annotated[str, typer.Option("--load", metavar="DIR", help="the actor's save folder")]
CriticLoad = Annotated[
    str | None, typer.Option("--critic-load", metavar="DIR", help="the critic's save folder, where the run has one")
]
Deep = Annotated[bool, typer.Option("--deep", help="compare the hash of every file")]


@app.command("check-resume")
def check_resume(
    ctx: typer.Context, load: Load, critic_load: CriticLoad = None, deep: Deep = False, fmt: FormatOption = Format.TEXT
) -> None:
    """Show what a run with these folders would start from; exit code 3 if it would be refused.

    As in a run, --critic-load follows --load; a critic is looked for if --critic-load is given, or the
    actor's checkpoint was saved beside one.
    """
    output = Output(fmt)
    ctx.find_root().obj = output
    has_critic = critic_load is not None or was_saved_beside_a_critic(load)
    report = examine_resume(load, critic_load, has_critic=has_critic, deep=deep)
    output.result(as_json(report, deep=deep), as_text(report, deep=deep))
    if report.problems:
        if not output.is_json:
            output.fail(ResumeError(report.problems))
        raise typer.Exit(ExitCode.CANNOT_RESUME)


@app.command("list")
def list_checkpoints(ctx: typer.Context, folder: Folder, fmt: FormatOption = Format.TEXT) -> None:
    """List the checkpoints of a save folder: iteration, size, age, and whether each is complete."""
    output = Output(fmt)
    ctx.find_root().obj = output
    tracker = layout.read_tracker(folder)
    rows = [describe(folder, iteration, tracker.iteration) for iteration in layout.list_iterations(folder)]
    header = ("iteration", "role", "size", "age", "state", "")
    cells = [
        (
            str(row["iteration"]),
            row["role"],
            f"{row['bytes'] / 1e6:.1f} MB",
            f"{row['age_seconds'] / 3600:.1f} h",
            row["reason"] or "complete",
            "<- latest" if row["latest"] else "",
        )
        for row in rows
    ]
    output.result(rows, table(header, cells) if rows else f"no checkpoints in {folder}")
    if tracker.problem is not None:
        output.note(f"warning: {tracker.problem}")


@app.command("verify")
def verify(ctx: typer.Context, folder: Folder, fmt: FormatOption = Format.TEXT) -> None:
    """Compare every file of every checkpoint in a save folder with its recorded hash; exit code 3 on a difference."""
    output = Output(fmt)
    ctx.find_root().obj = output
    found = {iteration: damages(folder, iteration, deep=True) for iteration in layout.list_iterations(folder)}
    ok = bool(found) and not any(found.values())
    data = {"ok": ok, "iterations": [{"iteration": i, "problems": problems} for i, problems in found.items()]}
    lines = [f"{i:>9}  {'; '.join(problems) or 'every hash is right'}" for i, problems in found.items()]
    output.result(data, "\n".join(lines) or f"no checkpoints in {folder}")
    if not ok:
        raise typer.Exit(ExitCode.CANNOT_RESUME)


def describe(folder: Path, iteration: int, latest: layout.Iteration) -> dict[str, Any]:
    """One checkpoint as a row of `list`."""
    checkpoint = layout.iteration_folder(folder, iteration)
    problems = damages(folder, iteration, deep=False)
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    return {
        "iteration": iteration,
        "role": "-" if problems else layout.read_meta(checkpoint).role,
        "bytes": sum(path.stat().st_size for path in files),
        "age_seconds": round(time.time() - checkpoint.stat().st_mtime),
        "complete": not problems,
        "reason": "; ".join(problems),
        "latest": iteration == latest,
    }


def damages(folder: Path, iteration: int, *, deep: bool) -> list[str]:
    """What is wrong with a checkpoint, in words."""
    try:
        return layout.damages(layout.iteration_folder(folder, iteration), deep=deep)
    except ResumeError as error:
        return [error.problems[0].message]


def as_json(report: ResumeReport, *, deep: bool) -> dict[str, Any]:
    """The object of `check-resume --format json`."""
    decision = report.decision
    sides = {side.role: side_json(side, deep=deep) for side in report.sides}
    return {
        "ok": not report.problems,
        "verdict": decision.verdict,
        "iteration": decision.iteration,
        "next_rollout_id": None if decision.verdict == "refuse" else decision.iteration or 0,
        "actor": sides["actor"],
        "critic": sides.get("critic"),
        "problems": [asdict(problem) for problem in report.problems],
        "fix": report.problems[0].fix if report.problems else None,
    }


def side_json(side: Side, *, deep: bool) -> dict[str, Any]:
    """One role of the object."""
    folder = side.folder
    tracker = layout.Tracker(None) if folder is None else layout.read_tracker(folder)
    complete, role = False, None
    if folder is not None and isinstance(tracker.iteration, int):
        complete = not damages(folder, tracker.iteration, deep=deep)
        checkpoint = layout.iteration_folder(folder, tracker.iteration)
        role = layout.read_meta(checkpoint).role if complete else None
    return {
        "path": None if folder is None else str(folder),
        "tracker": tracker.iteration if tracker.problem is None else tracker.problem,
        "iteration": side.iteration,
        "complete": complete,
        "role": role,
    }


def as_text(report: ResumeReport, *, deep: bool) -> str:
    """The table and the verdict of `check-resume`."""
    rows = []
    for side in report.sides:
        data = side_json(side, deep=deep)
        found = "none" if side.iteration is None else str(side.iteration)
        rows.append((side.role, str(data["path"]), found, "yes" if data["complete"] else "no", data["role"] or "-"))
    decision = report.decision
    verdicts = {
        "cold-start": "cold start: there is no checkpoint, so the run starts at rollout 0",
        "resume": f"resume: both continue with rollout {decision.iteration}"
        if len(report.sides) > 1
        else f"resume: the actor continues with rollout {decision.iteration}",
        "refuse": "refuse: see below",
    }
    return table(("role", "folder", "iteration", "complete", "saved by"), rows) + f"\n\n{verdicts[decision.verdict]}"
