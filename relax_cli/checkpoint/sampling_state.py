"""Numbers of a checkpoint that say where the sampling of a run is, as `sampling.safetensors`; absent without any."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from relax_cli.errors import ResumeError, problem_kind
from relax_cli.models.files import check_regular

FILE = "sampling.safetensors"
UNREADABLE = problem_kind(
    "checkpoint-sampling-unreadable",
    "Folders and checkpoints",
    "`sampling.safetensors` of a checkpoint (what `--curriculum` and `--partial-rollout` continue from) is damaged.",
)
Arrays = dict[str, NDArray[Any]]


def write_sampling(folder: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write the file, unless there is nothing to write."""
    if arrays:
        data = save({name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())})
        (folder / FILE).write_bytes(data)  # Not `save_file`, which does not say what the disk said.


def read_sampling(folder: Path) -> Arrays:
    """The arrays of a checkpoint; none where it has no such file. Raises ResumeError: the file is damaged."""
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        check_regular(path)
        return dict(load_file(path))
    except (OSError, SafetensorError, ValueError) as error:
        raise sampling_unreadable(folder, str(error)) from error


def sampling_unreadable(folder: Path, got: str) -> ResumeError:
    """The error of a file that is not what a run wrote."""
    fix = f"resume from an earlier checkpoint: relax checkpoint list {shlex.quote(str(folder.parent))} shows them"
    what = "what the checkpoint says of the run's sampling cannot be used"
    return ResumeError(UNREADABLE(what, where=str(folder / FILE), got=got, expected="a file that relax wrote", fix=fix))
