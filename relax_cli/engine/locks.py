"""One run, one folder: claims that end with the process, however it ends."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from relax_cli.config.schema import Config
from relax_cli.errors import ConfigError, Problem

NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS})
"""What some network file systems answer; there nothing can be claimed."""


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
    """Make the folders, and keep other runs out of them as long as the block lasts.

    Raises:
        ConfigError: another process is writing one of them, or one cannot be written.
    """
    with ExitStack() as stack:
        for folder, option in folders.items():
            stack.enter_context(_claimed(folder, option))
        yield


@contextmanager
def _claimed(folder: Path, option: str) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise _refused(
            "folder-unwritable", option, folder, f"the folder cannot be written: {error.strerror}"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refused("folder-locked", option, folder, "another run is writing this folder") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield


def _refused(rule: str, option: str, folder: Path, message: str) -> ConfigError:
    locked = rule == "folder-locked"
    return ConfigError(
        Problem(
            id=rule,
            message=message,
            option=option,
            where=str(folder),
            got="a folder in use" if locked else "a folder that refuses a new file",
            expected="a folder of its own for every run",
            fix=f"{option} {folder}-2" + (", or wait for the other run" if locked else ", or change its permissions"),
        )
    )
