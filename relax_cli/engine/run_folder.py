"""The folder of a run: a name of its own, its record of what was started, and locks that end with the process.

Not `filelock`: where a file system has no locks it leaves a marker file, which would outlive a killed run.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from relax_cli.config.schema import Config
from relax_cli.config.versions import installed_version
from relax_cli.errors import ConfigError, ProblemKind, problem_kinds
from relax_cli.preflight.check_run import CheckedRun
from relax_cli.preflight.completion import RUN_FORMAT

folder_kind = problem_kinds("Folders and checkpoints")
LOCKED = folder_kind("folder-locked", "Another running process writes the run folder or a save folder.")
UNWRITABLE = folder_kind("folder-unwritable", "The run folder or a save folder cannot be created or written.")
RUN_FOLDER_UNWRITABLE = folder_kind(
    "run-folder-unwritable",
    "`--run-dir` is unset, and `runs/ESTIMATOR-TIME` cannot be created where relax was started.",
    option="--run-dir",
)
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS})
"""Errors of network file systems without locks; nothing can be claimed there."""
RECORDED_VERSIONS = [
    "relax-cli",
    "torch",
    "megatron-core",
    "ray",
    "TransferQueue",
    "tensordict",
    "transformers",
    "safetensors",
    "sglang",
]
"""Distributions whose versions `config.json` records."""


def run_record(checked: CheckedRun, config: Config, command: str = "train") -> dict[str, Any]:
    """What `config.json` of the run folder says; `relax train --recipe config.json` runs it again."""
    versions = {"python": platform.python_version()}
    versions |= {name: found for name in RECORDED_VERSIONS if (found := installed_version(name)) is not None}
    record = {"format": RUN_FORMAT, **checked.dump(config)}
    return {**record, "command": ["relax", command, *checked.command], "versions": versions}


def new_run_folder(estimator: str) -> Path:
    """A folder of its own under `runs/`, also for two runs that start in the same second.
    Raises ConfigError: it cannot be made."""
    name = f"{estimator}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        folder = Path("runs", name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except OSError as error:
            exists = isinstance(error, FileExistsError)
            if exists and folder.parent.is_dir():
                continue
            raise ConfigError(
                RUN_FOLDER_UNWRITABLE(
                    "the run folder cannot be made",
                    where=os.path.abspath(folder),
                    got="a file called runs" if exists else str(error.strerror),
                    expected="a folder that can be created",
                    fix="--run-dir DIR, a folder that can be written",
                )
            ) from error
    raise AssertionError("the numbers never end")


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
            stack.enter_context(_locked(folder, option))
        yield


def _locked(folder: Path, option: str) -> TextIO:
    """The lock file, which keeps others out while it is open."""

    def refused(kind: ProblemKind, message: str, got: str, otherwise: str) -> ConfigError:
        fix, expected = f"{option} {folder}-2, or {otherwise}", "a folder of its own for every run"
        return ConfigError(kind(message, option=option, where=str(folder), got=got, expected=expected, fix=fix))

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w", encoding="utf-8")
    except OSError as error:
        message = f"the folder cannot be written: {error.strerror}"
        raise refused(UNWRITABLE, message, "a folder that refuses a new file", "change its permissions") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        message = "another run is writing this folder"
        raise refused(LOCKED, message, "a folder in use", "wait for the other run") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return lock
