"""Failures of the run folder: a disk that is full, broken or protected, a folder that was removed or renamed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_cli.errors import RunError, problem_kind, way_out

RUN_FOLDER_FAILED = problem_kind(
    "run-folder-failed",
    "Folders and checkpoints",
    "Metrics, samples or logs cannot be written: the disk is full, broken or protected, or the run folder was removed "
    "or renamed during the run. Saved checkpoints are intact.",
)
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE})
"""What the operating system says of a disk that is full, broken or protected."""


@contextmanager
def run_folder_errors(run_dir: Path) -> Iterator[None]:
    """Name the folder and its disk where a file cannot be written.
    Raises RunError: for such an OSError of the block; others are bugs and stay what they are."""
    try:
        yield
    except OSError as error:
        named = error.filename2 or error.filename
        place = Path(os.fsdecode(named)) if isinstance(named, str | bytes) else run_dir
        is_inside = place.is_relative_to(run_dir)
        if error.errno is None or not (is_inside or error.errno in DISK_ERRORS):
            raise
        # A name that is missing inside of a folder that is there was removed from it.
        gone = is_inside and (error.errno in (errno.ENOENT, errno.ENOTDIR) or not run_dir.is_dir())
        message, expected = f"a file of the run cannot be written: {error.strerror}", "a disk that can be written"
        fix = way_out(str(error)) or f"make room or repair the disk (df -h -i {run_dir}), then start or resume the run"
        if gone:
            message = "the run folder, or a part of it, was removed or renamed during the run"
            expected, fix = "a folder that stays where it is", "leave it in place; start or resume the run again"
        elif error.errno in (errno.EEXIST, errno.EISDIR):
            expected, fix = "nothing else of that name", f"rename or remove {place}, which relax has not written"
        raise RunError(
            RUN_FOLDER_FAILED(
                message,
                where=str(place),
                got=f"{errno.errorcode.get(error.errno, error.errno)}: {error.strerror}",
                expected=expected,
                fix=fix,
            )
        ) from error
