"""Writing and reading checkpoints of one role, in steps that a pair of roles can interleave.

    write     every rank puts its part under a temporary name; files are hashed and flushed to disk
    commit    the folder gets its final name
    publish   the tracker moves to it, last; then old checkpoints are dropped

The driver lets all roles finish one step before the next begins, so that a crash at any instant leaves the previous
pair, or the new one, complete. All ranks of a role write; rank 0 alone commits and publishes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from relax_cli.checkpoint import layout
from relax_cli.checkpoint.layout import CheckpointMeta
from relax_cli.errors import Problem, RunError


class Saveable(Protocol):
    """A model that writes and reads its own shards; see `TrainableModel`."""

    def save(self, folder: Path, common: dict[str, Any]) -> None:
        """Write this rank's shards into an empty folder."""

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore from shards."""

    def parallel_layout(self) -> dict[str, int]:
        """Sizes of the parallel groups."""


def write(model: Saveable, save_dir: Path, iteration: int, role: str, meta: dict[str, Any]) -> None:
    """Write everything of `iteration` under its temporary name. Every rank calls this.

    Args:
        meta: what `load` returns again, anything JSON can hold. `weight_version` (follows `iteration`), `seeds` and
            `config_hash` have places of their own in `relax.json`.

    Raises:
        RunError: on every rank, when the disk refused on one; nothing that existed was touched.
    """
    folder = layout.temporary_folder(save_dir, iteration)
    _on_first_rank(lambda: _make_empty(folder))
    model.save(folder, {"iteration": iteration, "role": role})
    extra = dict(meta)
    record = CheckpointMeta(
        role=role,
        iteration=iteration,
        weight_version=extra.pop("weight_version", iteration),
        seeds=extra.pop("seeds", {}),
        config_hash=extra.pop("config_hash", ""),
        parallel=model.parallel_layout(),
        extra=extra,
    )
    _on_first_rank(lambda: _finish(folder, record))


def commit(save_dir: Path, iteration: int) -> None:
    """Give the written checkpoint its final name; one of the same iteration from before a resume is replaced.

    Raises:
        RunError: the disk refused.
    """
    final = layout.iteration_folder(save_dir, iteration)
    with _disk_errors():
        if final.exists():
            _remove(final)
        layout.temporary_folder(save_dir, iteration).rename(final)
        layout.fsync_folder(save_dir)


def publish(save_dir: Path, iteration: int, keep: int | None = None) -> None:
    """Point the tracker at `iteration`, then drop all but the newest `keep` checkpoints (None: keep all).

    Raises:
        RunError: the disk refused.
    """
    with _disk_errors():
        layout.write_tracker(save_dir, iteration)
        rotate(save_dir, iteration, keep)


def load(model: Saveable, folder: Path) -> dict[str, Any]:
    """Restore a model from a checkpoint folder; returns `role`, `iteration` and the `meta` that `write` was given.

    Every rank calls this.

    Raises:
        ResumeError: `relax.json` is unusable, or the shards do not fit this model or cannot be read.
    """
    meta = layout.read_meta(folder)
    model.load(folder)
    known = {"weight_version": meta.weight_version, "seeds": meta.seeds, "config_hash": meta.config_hash}
    return {"role": meta.role, "iteration": meta.iteration, **known, **meta.extra}


def rotate(save_dir: Path, current: int, keep: int | None) -> None:
    """Drop all but the newest `keep` checkpoints up to `current`, and leftovers of interrupted writes."""
    for leftover in save_dir.glob(".iter_*.tmp*"):
        shutil.rmtree(leftover)
    if keep is None:
        return
    assert keep >= 1, "the schema refuses less"
    for iteration in [i for i in layout.list_iterations(save_dir) if i <= current][:-keep]:
        _remove(layout.iteration_folder(save_dir, iteration))


def _on_first_rank(action: Callable[[], None]) -> None:
    """Run `action` on rank 0 while the others wait; a disk error there is raised on all."""
    failure: list[RunError | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            with _disk_errors():
                action()
        except RunError as error:
            failure[0] = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise failure[0]


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_failed(error, Path(error.filename or ".")) from error


def storage_failed(error: BaseException, where: Path) -> RunError:
    """What to say when a checkpoint could not be written."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return RunError(
        Problem(
            id="storage-failed",
            message=f"writing the checkpoint failed: {reason}",
            fix="make room or repair the permissions of the folder; the previous checkpoint is intact",
            where=str(where),
        )
    )


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _finish(folder: Path, meta: CheckpointMeta) -> None:
    for path in layout.list_files(folder):
        layout.fsync_file(folder / path)
    files = layout.describe_files(folder)
    layout.write_meta(folder, CheckpointMeta(**{**vars(meta), "files": files}))


def _remove(folder: Path) -> None:
    """Take the final name away first: a folder that has it must be complete."""
    doomed = folder.with_name(f".{folder.name}.tmp-old")
    folder.rename(doomed)
    shutil.rmtree(doomed)
