"""The folder of a run: a name of its own, and the record of what was started."""

from __future__ import annotations

import itertools
import os
import platform
import time
from pathlib import Path
from typing import Any

from relax_cli.config.schema import Config
from relax_cli.config.versions import installed_version
from relax_cli.errors import ConfigError, Problem, problem_kind
from relax_cli.preflight.check_run import CheckedRun
from relax_cli.preflight.completion import RUN_FORMAT

RUN_FOLDER_UNWRITABLE = problem_kind(
    "run-folder-unwritable",
    "Folders and checkpoints",
    "`--run-dir` is unset, and `runs/ESTIMATOR-TIME` cannot be created where relax was started.",
    option="--run-dir",
)
RECORDED_VERSIONS = (
    "relax-cli",
    "torch",
    "megatron-core",
    "ray",
    "TransferQueue",
    "tensordict",
    "transformers",
    "safetensors",
    "sglang",
)
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
        except FileExistsError:
            if folder.parent.is_dir():
                continue
            raise ConfigError(_no_run_folder(folder, "a file called runs")) from None
        except OSError as error:
            raise ConfigError(_no_run_folder(folder, str(error.strerror))) from error
        return folder
    raise AssertionError("the numbers never end")


def _no_run_folder(folder: Path, reason: str) -> Problem:
    return RUN_FOLDER_UNWRITABLE(
        "the run folder cannot be made",
        where=os.path.abspath(folder),
        got=reason,
        expected="a folder that can be created",
        fix="--run-dir DIR, a folder that can be written",
    )
