"""Writing and reading checkpoints of one role. A save has steps that a pair of roles can interleave:

    prepare   every rank takes its part of the state
    write     and puts it under a temporary name, hashed while it is written and flushed to disk; all ranks of a role
              take part, rank 0 alone writes what a role has once
    commit, publish, rotate or withdraw (`folders`): the driver, on what has been written

All roles finish one step before the next begins, so that a crash at any instant leaves the previous pair, or the new
one, complete.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import torch.distributed as dist

from relax_cli.checkpoint import layout
from relax_cli.checkpoint.folders import disk_errors
from relax_cli.checkpoint.layout import CheckpointMeta, FileEntry
from relax_cli.checkpoint.sampling_state import write_sampling
from relax_cli.checkpoint.side import UNREADABLE
from relax_cli.errors import ResumeError, RunError

T = TypeVar("T")

Group: TypeAlias = dist.ProcessGroup | None
"""All ranks of this role; None is the group that they compute in."""


class Saveable(Protocol):
    """A model that writes and reads its own shards; see `TrainableModel`.

    `prepare_save` takes the state, `copied` if it may change before it is written. The function that it returns writes
    this rank's shards into an empty folder, and returns the files it wrote, as far as it hashed them.
    """

    def prepare_save(self, common: dict[str, Any], *, copied: bool) -> Callable[[Path, Group], list[FileEntry]]: ...
    def load(self, folder: Path) -> object: ...
    def random_state(self) -> dict[str, Any]: ...
    def restore_random_state(self, state: dict[str, Any]) -> None: ...
    def parallel_layout(self) -> dict[str, int]: ...


def own_group() -> Group:
    """A group for `prepare` in which ranks can write while they compute in another. Every rank calls this."""
    return dist.new_group(backend="gloo") if world_size() > 1 else None


def prepare(
    model: Saveable,
    save_dir: Path,
    iteration: int,
    role: str,
    meta: dict[str, Any],
    *,
    copied: bool,
    group: Group = None,
) -> Callable[[], None]:
    """Take everything of `iteration`; the returned function writes it under its temporary name. Every rank calls both.
    Both raise RunError on every rank when the disk refused on one; nothing that existed was touched.

    Args:
        meta: JSON values for `relax.json`. `weight_version` (follows `iteration`), `seeds` and `config_hash` have
            places of their own in it, the arrays of `sampling` a file.
        copied: the model may change before it is written.
        group: where ranks meet while they write.
    """
    extra = dict(meta)
    sampling = extra.pop("sampling", {})
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
    folder = layout.temporary_folder(save_dir, iteration)
    on_first_rank(lambda: _make_empty(folder))
    write_shards = model.prepare_save({"iteration": iteration, "role": role}, copied=copied)

    def write() -> None:
        try:
            hashed = gather(write_shards(folder, group), group)
            on_first_rank(lambda: write_sampling(folder, sampling), group)
            on_first_rank(lambda: _finish(folder, record, [e for entries in hashed for e in entries]), group)
        except RunError:
            # What is left takes the room that the next attempt needs.
            if is_first_rank():
                shutil.rmtree(folder, ignore_errors=True)
            raise

    return write


def load(model: Saveable, folder: Path) -> CheckpointMeta:
    """Restore a model from a checkpoint folder. Every rank calls this. Random generators belong to ranks, so they are
    restored only at the parallel layout of the checkpoint; nothing a run computes depends on them.
    Raises ResumeError: `relax.json` is unusable, a file has changed, or the shards do not fit this model."""
    meta = layout.read_meta(folder)
    share = meta.files[rank() :: world_size()]
    damages = gather([layout.damage_of(folder, entry, deep=True) for entry in share])
    if damaged := next((damage for found in damages for damage in found if damage), None):
        problem = UNREADABLE(
            f"the {meta.role}'s checkpoint is damaged: {damaged}",
            option="--critic-load" if meta.role == "critic" else "--load",
            where=str(folder),
            got=damaged,
            expected="every file as it was written",
            fix="`relax checkpoint check-resume --deep` with this run's --load and --critic-load says how to go back",
        )
        raise ResumeError(problem)
    model.load(folder)
    if meta.parallel == model.parallel_layout() and len(meta.random_state) == world_size():
        model.restore_random_state(meta.random_state[rank()])
    return meta


def rank() -> int:
    """This process among the ranks of its role."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first_rank() -> bool:
    """Whether this process is the one that writes what a role has once."""
    return rank() == 0


def world_size(group: Group = None) -> int:
    """Ranks of this role, or of a group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def on_first_rank(action: Callable[[], None], group: Group = None) -> None:
    """Run `action` on rank 0 while the others wait. Raises RunError: on every rank, where the disk refused."""
    failure: list[RunError | None] = [None]
    if is_first_rank():
        try:
            with disk_errors():
                action()
        except RunError as error:
            failure[0] = error
    if world_size() > 1:
        dist.broadcast_object_list(failure, src=0, group=group)
    if failure[0] is not None:
        raise failure[0]


def gather(value: T, group: Group = None) -> list[T]:
    """The values of all ranks, of this role or of a group, in rank order, on each of them."""
    if world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


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
        entry = known.pop(path.as_posix(), None) or layout.describe_file(folder, path)
        size = (folder / path).stat().st_size
        if size != entry.size:
            raise OSError(errno.EIO, f"{size} bytes arrived of {entry.size}", str(folder / path))
        entries.append(entry)
    if known:
        raise OSError(errno.EIO, "a file that a rank wrote is not here", str(folder / min(known)))
    layout.write_meta(folder, replace(meta, files=tuple(entries)))
