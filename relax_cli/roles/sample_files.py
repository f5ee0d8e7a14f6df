"""The samples of a run: `rollouts/step_000001.jsonl` and `evals/step_000000.jsonl`, one JSON object per sample."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from relax_cli.checkpoint.layout import fsync_folder
from relax_cli.roles.run_folder import run_folder_errors


class SampleWriter:
    """Writes the samples of each step."""

    def __init__(self, run_dir: Path, folder: Literal["rollouts", "evals"] = "rollouts") -> None:
        self._run_dir = run_dir
        self._folder = run_dir / folder
        with run_folder_errors(run_dir):
            self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, samples: Iterable[Mapping[str, Any]], *, append: bool = False) -> Path:
        """Write one JSON object per sample; returns the file.

        Args:
            append: add to the file, as the second and later workers of a step do, instead of replacing it whole.
        """
        path = self._folder / f"step_{step:06d}.jsonl"
        text = "".join(json_line(sample) for sample in samples)
        with run_folder_errors(self._run_dir), path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # Like the step's metrics, on the disk before a checkpoint counts.
            os.fsync(file.fileno())
            if not append:
                fsync_folder(self._folder)
        return path


def drop_samples(run_dir: Path, done: int) -> None:
    """Delete sample files of steps after `done`, which an aborted run left; all when nothing is done."""
    for path in run_dir.glob("*/step_*.jsonl"):
        if int(path.stem.removeprefix("step_")) > done or not done:
            path.unlink()


def json_line(record: Mapping[str, Any]) -> str:
    """One object of a JSONL file; NaN and infinity become null."""
    return json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
