"""`relax checkpoint align`, `prune` and `export-hf`: what changes or writes something. The first two show it before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from relax_cli.checkpoint import align, layout, prune
from relax_cli.checkpoint.fingerprint import folder_of_model
from relax_cli.checkpoint.side import is_one_checkpoint
from relax_cli.cli.console import Output, path_argument, path_option
from relax_cli.cli.text import WIDTH
from relax_cli.engine.run_folder import claimed
from relax_cli.errors import ConfigError, ResumeError, RunError, problem_kind
from relax_cli.preflight.rules.model import model_folder_missing

NO_CHECKPOINT = problem_kind(
    "export-no-checkpoint", "Folders and checkpoints", "The save folder has no checkpoint of that iteration."
)
CHANGE_FAILED = problem_kind(
    "checkpoint-change-failed",
    "Folders and checkpoints",
    "The disk refused while `relax checkpoint align` or `prune` was changing a save folder. The same command continues "
    "from there.",
)

Yes = Annotated[bool, typer.Option("--yes", help="do it; without this it is only shown")]
Dtype = Literal["as-trained", "float32", "bfloat16", "float16"]
NOT_DONE = "nothing was changed; --yes does it"


def model_folder(name: str, fix: str) -> Path:
    """The model's folder. Raises ConfigError: it is not there."""
    folder = folder_of_model(name)
    if folder is None:
        message, expected = "the model folder does not exist", "a folder with config.json and tokenizer"
        raise ConfigError(model_folder_missing.kind(message, fix=fix, got=name, expected=expected))
    return folder


def align_trackers(
    output: Output,
    load: Annotated[Path, path_option("--load", "the actor's save folder")],
    critic_load: Annotated[Path, path_option("--critic-load", "the critic's save folder")],
    deep: Annotated[bool, typer.Option("--deep", help="compare the hash of every file of the two checkpoints")] = False,
    yes: Yes = False,
) -> None:
    """Point both trackers at the newest iteration that is complete in both folders.

    Nothing is deleted. Exit code 3 if there is no such iteration.
    """
    plan = align.plan_alignment(load, critic_load, deep=deep)
    if yes and plan.changes:
        with _alone({load: "--load", critic_load: "--critic-load"}):
            align.apply(plan)
    data = {
        "ok": True,
        "iteration": plan.iteration,
        "changed": yes and plan.changes,
        "trackers": [
            {
                "role": role,
                "path": str(folder / layout.TRACKER_FILE),
                "from": tracker.problem or tracker.iteration,
                "to": plan.iteration,
            }
            for role, (folder, tracker) in plan.trackers.items()
        ],
        "left_out": [{"iteration": i, "reason": reason} for i, reason in plan.left_out.items()],
    }
    output.result(data, _alignment_text(plan, done=yes))


def prune_checkpoints(
    output: Output,
    folder: Annotated[Path, path_argument("DIR", "the actor's save folder")],
    keep: Annotated[int, typer.Option("--keep", min=1, help="complete checkpoints, or pairs, to keep")],
    critic: Annotated[Path | None, path_option("--critic", "the critic's save folder, where the run has one")] = None,
    yes: Yes = False,
) -> None:
    """Remove old and broken checkpoints.

    Never what a tracker names, the newest complete one, or one half of a pair that is kept.
    """
    plan = prune.plan_pruning(folder, critic, keep)
    if yes and not all(entry.keep for entry in plan):
        with _alone({folder: "DIR"} | ({critic: "--critic"} if critic is not None else {})):
            # Another run may have finished a save since.
            plan = prune.plan_pruning(folder, critic, keep)
            prune.apply(plan)
    doomed = [entry for entry in plan if not entry.keep]
    freed = sum(entry.bytes for entry in doomed)
    data = {
        "ok": True,
        "removed": yes and bool(doomed),
        "bytes": freed,
        "checkpoints": [asdict(entry) for entry in plan],
    }
    output.result(data, _pruning_text(plan, freed, done=yes))


def export(
    output: Output,
    folder: Annotated[Path, path_argument("DIR", "the actor's save folder, or one checkpoint in it")],
    out: Annotated[Path, path_argument("OUT", "folder to write, new or empty")],
    hf_checkpoint: Annotated[str, path_option("--hf-checkpoint", "the model the run was started with", "MODEL")],
    iteration: Annotated[int | None, typer.Option("--iteration", min=0, help="default: what the tracker names")] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="type of the weights")] = "as-trained",
    peft: Annotated[bool, typer.Option("--peft", help="write the low-rank adapters alone, for PEFT")] = False,
) -> None:
    """Write the actor of a checkpoint as a Hugging Face model: safetensors, config.json and tokenizer files.

    Low-rank adapters are merged into the weights of MODEL, unless --peft asks for them alone.
    """
    model = model_folder(hf_checkpoint, "give the folder or package that the run was started with")
    checkpoint = chosen_checkpoint(folder, iteration)
    meta = layout.read_meta(checkpoint)
    # Only here: the other commands of this module answer without importing torch.
    import torch

    from relax_cli.checkpoint.export import export_hf

    kept = None if dtype == "as-trained" else getattr(torch, dtype)
    done = export_hf(checkpoint, out, model, kept, peft=peft)
    data = {
        "ok": True,
        "out": str(out),
        "iteration": meta.iteration,
        "dtype": done.dtype,
        "parameters": done.parameters,
        "bytes": done.size,
    }
    text = (
        f"wrote {out}\n"
        f"  from      {checkpoint}\n"
        f"  weights   {done.parameters:,} parameters, {done.dtype}, {_megabytes(done.size)} with tokenizer"
    )
    output.result(data, text)


def chosen_checkpoint(folder: Path, iteration: int | None) -> Path:
    """The checkpoint of `iteration`, or the one that the tracker names. Raises ResumeError: there is none."""
    if iteration is None and is_one_checkpoint(folder):
        return folder
    align.require_save_folder("DIR", folder)
    tracker = layout.read_tracker(folder)
    wanted = tracker.iteration if iteration is None else iteration
    there = layout.list_iterations(folder)
    if isinstance(wanted, int) and wanted in there:
        return layout.iteration_folder(folder, wanted)
    got = f"--iteration {iteration}" if iteration is not None else tracker.problem or f"tracker: {tracker.iteration}"
    raise ResumeError(
        NO_CHECKPOINT(
            "there is no such checkpoint",
            fix=f"--iteration {there[-1]}" if there else "give the folder that --save named",
            option="--iteration" if iteration is not None else "DIR",
            where=str(folder),
            got=got,
            expected=f"one of {', '.join(str(i) for i in there[-8:])}" if there else "a folder with checkpoints",
        )
    )


@contextmanager
def _alone(folders: dict[Path, str]) -> Iterator[None]:
    """Keep runs out of the folders, and turn a disk's refusal into an error for people."""
    with ExitStack() as stack:
        try:
            stack.enter_context(claimed(folders))
        except ConfigError as error:
            found = error.problems[0]
            fix = "wait until the run has ended, or stop it" if found.id == "folder-locked" else "see its permissions"
            raise ConfigError(replace(found, fix=fix)) from error
        try:
            yield
        except OSError as error:
            raise RunError(
                CHANGE_FAILED(
                    f"the folder could not be changed: {error.strerror}",
                    fix="repair the permissions or the disk, and run the command again: it continues where it stopped",
                    where=str(error.filename or ""),
                )
            ) from error


def _alignment_text(plan: align.Alignment, *, done: bool) -> str:
    lines = [f"iteration {plan.iteration} is the newest that both can resume from", ""]
    for role, (folder, tracker) in plan.trackers.items():
        found = tracker.iteration
        before = "unreadable" if tracker.problem else "no tracker" if found is None else str(found)
        change = f"{plan.iteration}, as it is" if found == plan.iteration else f"{before} -> {plan.iteration}"
        lines.append(f"  {role:<7} {change:<16} {folder / layout.TRACKER_FILE}")
    lines += [f"  not {iteration}: {reason}" for iteration, reason in plan.left_out.items()]
    end = "done; nothing was deleted" if done else NOT_DONE
    return "\n".join([*lines, "", end if plan.changes else "nothing to do"])


def _pruning_text(plan: list[prune.Entry], freed: int, *, done: bool) -> str:
    lines: list[str] = []
    for entry in plan:
        heading = f"{entry.role} in {entry.path.parent}"
        if heading not in lines:
            lines.append(heading)
        verb = "keep" if entry.keep else "drop"
        line = f"  {verb}  {entry.path.name:<18} {_megabytes(entry.bytes):>10}  "
        fits = len(line) + len(entry.reason) <= WIDTH
        lines += [line + entry.reason] if fits else [line.rstrip(), f"        {entry.reason}"]
    end = f"removed {_megabytes(freed)}" if done else f"{_megabytes(freed)} would be freed; {NOT_DONE}"
    return "\n".join([*lines, "", "nothing to remove" if all(entry.keep for entry in plan) else end])


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
