"""Checkpoint folders that look whole, without a model in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relax_cli.checkpoint import layout
from relax_cli.checkpoint.resume import ResumeDecision, examine_resume
from relax_cli.errors import ResumeError

SHARDED = (".metadata", "metadata.json", "__0_0.distcp")
"""Files of Megatron's sharded format."""


def save(folder: Path, role: str, *iterations: int, config_hash: str = "c", **extra: Any) -> str:
    """Complete checkpoints of a role, the tracker at the last."""
    for iteration in iterations:
        checkpoint = write_weights(layout.iteration_folder(folder, iteration), f"{role} {iteration}")
        meta = layout.CheckpointMeta(
            role=role,
            iteration=iteration,
            weight_version=iteration,
            seeds=extra.get("seeds", {}),
            config_hash=config_hash,
            parallel={"tensor_parallel": 1, "data_parallel": 1},
            extra={"has_critic": True, **extra},
            files=describe_files(checkpoint),
        )
        layout.write_meta(checkpoint, meta)
        layout.write_tracker(folder, iteration)
    return str(folder)


def describe_files(folder: Path) -> tuple[layout.FileEntry, ...]:
    """Sizes and hashes of every file but `relax.json`."""
    return tuple(layout.describe_file(folder, path) for path in layout.list_files(folder))


def write_weights(checkpoint: Path, content: str = "weights") -> Path:
    """The files of a sharded Megatron checkpoint, without `relax.json`."""
    checkpoint.mkdir(parents=True)
    for name in SHARDED:
        (checkpoint / name).write_text(content)
    return checkpoint


def save_release(folder: Path) -> str:
    """Weights that no run counted."""
    write_weights(folder / "release")
    (folder / layout.TRACKER_FILE).write_text("release\n")
    return str(folder)


def decide_resume(load: str | None, critic_load: str | None, *, has_critic: bool, **options: Any) -> ResumeDecision:
    """`examine_resume`; raises ResumeError with every problem where it refuses."""
    report = examine_resume(load, critic_load, has_critic=has_critic, **options)
    if report.problems:
        raise ResumeError(report.problems)
    return report.decision
