"""Writing and reading checkpoints of one role, in steps that a pair of roles can interleave.

    write     every rank puts its part under a temporary name, hashed while it is written and flushed to disk
    commit    the folder gets its final name
    publish   the tracker moves to it
    rotate    old checkpoints are dropped
    withdraw  instead of the rest, when a step failed in any role

The driver lets all roles finish one step before the next begins, so that a crash at any instant leaves the previous
pair, or the new one, complete. All ranks of a role write; rank 0 alone does the rest.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from relax_cli.checkpoint import layout
from relax_cli.checkpoint.layout import Best, CheckpointMeta, FileEntry
from relax_cli.checkpoint.sampling_state import write_sampling
from relax_cli.errors import RunError, problem_kind

T = TypeVar("T")

STORAGE_FAILED = problem_kind(
    "storage-failed",
    "Folders and checkpoints",
    "Writing a checkpoint failed. The previous one is intact, unless its folder was removed. `--on-save-error` decides "
    "whether the run ends.",
)


class Saveable(Protocol):
    """A model that writes and reads its own shards; see `TrainableModel`."""

    def save(self, folder: Path, common: dict[str, Any]) -> list[FileEntry]:
        """Write this rank's shards into an empty folder; returns the files it wrote, as far as it hashed them."""

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore from shards."""

    def random_state(self) -> dict[str, Any]:
        """State of this rank's random generators, as JSON values."""

    def restore_random_state(self, state: dict[str, Any]) -> None:
        """Undo `random_state`; raises ResumeError where it is not such a state."""

    def parallel_layout(self) -> dict[str, int]:
        """Sizes of the parallel groups."""


def write(model: Saveable, save_dir: Path, iteration: int, role: str, meta: dict[str, Any]) -> None:
    """Write everything of `iteration` under its temporary name. Every rank calls this.

    Args:
        meta: what `load` returns again, as JSON values. `weight_version` (follows `iteration`), `seeds` and
            `config_hash` have places of their own in `relax.json`, the arrays of `sampling` a file.

    Raises:
        RunError: on every rank, when the disk refused on one; nothing that existed was touched.
    """
    folder = layout.temporary_folder(save_dir, iteration)
    on_first_rank(lambda: _make_empty(folder))
    try:
        hashed = gather(model.save(folder, {"iteration": iteration, "role": role}))
        extra = dict(meta)
        sampling = extra.pop("sampling", {})
        on_first_rank(lambda: write_sampling(folder, sampling))
        record = CheckpointMeta(
            role=role,
            iteration=iteration,
            weight_version=extra.pop("weight_version", iteration),
            seeds=extra.pop("seeds", {}),
            config_hash=extra.pop("config_hash", ""),
            parallel=model.parallel_layout(),
            extra=extra,
            random_state=tuple(gather(model.random_state())),
        )
        on_first_rank(lambda: _finish(folder, record, [entry for entries in hashed for entry in entries]))
    except RunError:
        # What is left takes the room that the next attempt needs.
        if is_first_rank():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def commit(save_dir: Path, iteration: int) -> None:
    """Give the written checkpoint its final name; one of the same iteration from before a resume is replaced.

    Raises:
        RunError: the disk refused.
    """
    final = layout.iteration_folder(save_dir, iteration)
    with _disk_errors():
        if final.exists():
            layout.remove_checkpoint(final)
        layout.temporary_folder(save_dir, iteration).rename(final)
        layout.fsync_folder(save_dir)


def publish(save_dir: Path, iteration: int) -> None:
    """Point the tracker at `iteration`.

    Raises:
        RunError: the disk refused.
    """
    with _disk_errors():
        layout.write_tracker(save_dir, iteration)


def withdraw(save_dir: Path, iteration: int) -> None:
    """Undo a save of `iteration` that failed somewhere: the tracker goes back, and the disk gets its room back.

    Raises:
        RunError: the disk refused; a folder that the tracker still names stays.
    """
    with _disk_errors():
        _remove_leftovers(save_dir)
        if layout.read_tracker(save_dir).iteration == iteration:
            older = [i for i in layout.list_iterations(save_dir) if i < iteration]
            complete = [i for i in older if layout.is_complete(layout.iteration_folder(save_dir, i))]
            if complete:
                layout.write_tracker(save_dir, complete[-1])
            else:
                (save_dir / layout.TRACKER_FILE).unlink()
        final = layout.iteration_folder(save_dir, iteration)
        if final.exists():
            layout.remove_checkpoint(final)


def load(model: Saveable, folder: Path) -> dict[str, Any]:
    """Restore a model from a checkpoint folder; returns `role`, `iteration` and the `meta` that `write` was given.

    Every rank calls this. Random generators belong to ranks, so they are restored only at the parallel layout of the
    checkpoint; nothing a run computes depends on them.

    Raises:
        ResumeError: `relax.json` is unusable, or the shards do not fit this model or cannot be read.
    """
    meta = layout.read_meta(folder)
    model.load(folder)
    if meta.parallel == model.parallel_layout() and len(meta.random_state) == world_size():
        model.restore_random_state(meta.random_state[dist.get_rank() if dist.is_initialized() else 0])
    known = {"weight_version": meta.weight_version, "seeds": meta.seeds, "config_hash": meta.config_hash}
    return {"role": meta.role, "iteration": meta.iteration, **known, **meta.extra}


def rotate(save_dir: Path, current: int, keep: int | None, protected: Collection[int] = ()) -> None:
    """Drop what is older than the newest `keep` complete checkpoints up to `current` (None: keep all).

    What interrupted writes left goes in any case, the iterations `protected` in none.

    Raises:
        RunError: the disk refused.
    """
    with _disk_errors():
        _remove_leftovers(save_dir)
        if keep is None:
            return
        assert keep >= 1, "the schema refuses less"
        folders = [layout.iteration_folder(save_dir, i) for i in layout.list_iterations(save_dir) if i <= current]
        complete = [folder for folder in folders if layout.is_complete(folder)]
        if len(complete) > keep:
            for folder in folders[: folders.index(complete[-keep])]:
                if folder not in [layout.iteration_folder(save_dir, i) for i in protected]:
                    layout.remove_checkpoint(folder)


def mark_best(save_dir: Path, best: Best) -> None:
    """Note which checkpoint is the best.

    Raises:
        RunError: the disk refused.
    """
    with _disk_errors():
        layout.write_best(save_dir, best)


def is_first_rank() -> bool:
    """Whether this process is the one that writes what a role has once."""
    return not dist.is_initialized() or dist.get_rank() == 0


def world_size() -> int:
    """Ranks of this role."""
    return dist.get_world_size() if dist.is_initialized() else 1


def on_first_rank(action: Callable[[], None]) -> None:
    """Run `action` on rank 0 while the others wait.

    Raises:
        RunError: on every rank, where the disk refused.
    """
    failure: list[RunError | None] = [None]
    if is_first_rank():
        try:
            with _disk_errors():
                action()
        except RunError as error:
            failure[0] = error
    if world_size() > 1:
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise failure[0]


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks, of this role or of a group, in rank order, on each of them."""
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    if ranks == 1:
        return [value]
    values: list[Any] = [None] * ranks
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_failed(error, Path(error.filename or ".")) from error


def storage_failed(error: BaseException, where: Path) -> RunError:
    """What to say when a checkpoint could not be written."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    fix = "make room or repair the permissions of the folder; the previous checkpoint is intact"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        fix = "leave the save folder where it is during a run; something removed or renamed it, or a part of it"
    return RunError(
        STORAGE_FAILED(
            f"writing the checkpoint failed: {reason}",
            fix=fix,
            where=str(where),
        )
    )


def _remove_leftovers(save_dir: Path) -> None:
    for leftover in layout.list_leftovers(save_dir):
        layout.remove_tree(leftover)


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True)
    for path in made:
        layout.fsync_folder(path.parent)


def _finish(folder: Path, meta: CheckpointMeta, hashed: list[FileEntry]) -> None:
    known = {entry.path: entry for entry in hashed}
    entries: list[FileEntry] = []
    for path in layout.list_files(folder):
        layout.fsync_file(folder / path)
        entry = known.get(path.as_posix()) or layout.describe_file(folder, path)
        size = (folder / path).stat().st_size
        if size != entry.size:
            raise OSError(errno.EIO, f"{size} bytes arrived of {entry.size}", str(folder / path))
        entries.append(entry)
    missing = known.keys() - {entry.path for entry in entries}
    if missing:
        raise OSError(errno.EIO, "a file that a rank wrote is not here", str(folder / min(missing)))
    layout.write_meta(folder, replace(meta, files=tuple(entries)))
