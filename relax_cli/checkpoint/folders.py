"""What becomes of a checkpoint that all ranks have written: its final name, the tracker, and what is dropped.

Knows neither torch nor a role, so the driver does it by itself, also where a role has failed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_cli.checkpoint import layout
from relax_cli.errors import RunError, problem_kind, way_out

STORAGE_FAILED = problem_kind(
    "storage-failed",
    "Folders and checkpoints",
    "Writing a checkpoint failed. The previous one is intact, unless its folder was removed. `--on-save-error` decides "
    "whether the run ends.",
)


@contextmanager
def disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_failed(error, Path(error.filename or ".")) from error


publish = disk_errors()(layout.write_tracker)
"""Point the tracker at an iteration. Raises RunError: the disk refused."""
mark_best = disk_errors()(layout.write_best)
"""Note which checkpoint is the best. Raises RunError: the disk refused."""


def commit(save_dir: Path, iteration: int) -> None:
    """Give the written checkpoint its final name; one of the same iteration from before a resume is replaced.
    Raises RunError: the disk refused."""
    final = layout.iteration_folder(save_dir, iteration)
    with disk_errors():
        if final.exists():
            layout.remove_checkpoint(final)
        layout.temporary_folder(save_dir, iteration).rename(final)
        layout.fsync_folder(save_dir)


def withdraw(save_dir: Path, iteration: int) -> None:
    """Undo a save of `iteration` that failed somewhere: the tracker goes back, and the disk gets its room back.
    Raises RunError: the disk refused; a folder that the tracker still names stays."""
    with disk_errors():
        layout.remove_leftovers(save_dir)
        if layout.read_tracker(save_dir).iteration == iteration:
            if older := [i for i in layout.complete_iterations(save_dir) if i < iteration]:
                layout.write_tracker(save_dir, older[-1])
            else:
                (save_dir / layout.TRACKER_FILE).unlink()
        final = layout.iteration_folder(save_dir, iteration)
        if final.exists():
            layout.remove_checkpoint(final)


def rotate(save_dir: Path, current: int, keep: int | None, protected: Collection[int] = ()) -> None:
    """Drop what is older than the newest `keep` complete checkpoints up to `current` (None: keep all).
    What interrupted writes left goes in any case, the iterations `protected` in none. Raises RunError: as above."""
    with disk_errors():
        layout.remove_leftovers(save_dir)
        if keep is None:
            return
        assert keep >= 1, "the schema refuses less"
        complete = [i for i in layout.complete_iterations(save_dir) if i <= current]
        if len(complete) > keep:
            for iteration in layout.list_iterations(save_dir):
                if iteration < complete[-keep] and iteration not in protected:
                    layout.remove_checkpoint(layout.iteration_folder(save_dir, iteration))


def storage_failed(error: BaseException, where: Path) -> RunError:
    """What to say when a checkpoint could not be written."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    fix = way_out(reason) or "make room or repair the permissions of the folder; the previous checkpoint is intact"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        fix = "leave the save folder where it is during a run; something removed or renamed it, or a part of it"
    return RunError(STORAGE_FAILED(f"writing the checkpoint failed: {reason}", fix=fix, where=str(where)))
