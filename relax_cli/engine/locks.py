"""One run, one folder: locks that end with the process, also after a kill.

Not `filelock`: where a file system has no locks it leaves a marker file, which would outlive a killed run.
"""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from relax_cli.config.schema import Config
from relax_cli.errors import ConfigError, problem_kind

NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS})
"""Errors of network file systems without locks; nothing can be claimed there."""

LOCKED = problem_kind(
    "folder-locked", "Folders and checkpoints", "Another running process writes the run folder or a save folder."
)
UNWRITABLE = problem_kind(
    "folder-unwritable", "Folders and checkpoints", "The run folder or a save folder cannot be created or written."
)


def written_folders(config: Config) -> dict[Path, str]:
    """Each folder that a run writes, and the option that names it; one folder may be named twice."""
    named = (
        ("--critic-save", config.critic.critic_save),
        ("--save", config.checkpoint.save),
        ("--run-dir", config.run.run_dir),
    )
    return {Path(folder).resolve(): option for option, folder in named if folder is not None}


@contextmanager
def claimed(folders: Mapping[Path, str]) -> Iterator[None]:
    """Make the folders, and keep other runs out of them while the block runs.
    Raises ConfigError: another process is writing one of them, or one cannot be written."""
    with ExitStack() as stack:
        for folder, option in folders.items():
            stack.enter_context(_claimed(folder, option))
        yield


@contextmanager
def _claimed(folder: Path, option: str) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            UNWRITABLE(
                f"the folder cannot be written: {error.strerror}",
                option=option,
                where=str(folder),
                got="a folder that refuses a new file",
                expected="a folder of its own for every run",
                fix=f"{option} {folder}-2, or change its permissions",
            )
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                LOCKED(
                    "another run is writing this folder",
                    option=option,
                    where=str(folder),
                    got="a folder in use",
                    expected="a folder of its own for every run",
                    fix=f"{option} {folder}-2, or wait for the other run",
                )
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield
