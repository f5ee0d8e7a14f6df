"""The files of a run folder: `config.json`, `metrics.jsonl` and `tb/`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from relax_cli.errors import Problem, ResumeError
from relax_cli.roles.sample_files import json_line


class MetricsWriter:
    """Appends one JSON object per step to `metrics.jsonl`; a line is on the disk when `write` returns.

    Opened with the first step that will be written. Lines at or after it, and a torn last line, were left by
    a run that was aborted after its last checkpoint: they are dropped, since those steps run again.
    """

    def __init__(self, run_dir: Path, first_step: int = 0) -> None:
        """Open the file, which may not exist yet.

        Raises:
            ResumeError: what is there does not end with step `first_step - 1`, or is not ours.
        """
        self._path = run_dir / "metrics.jsonl"
        self._next_step = first_step
        if self._path.exists():
            text = self._path.read_text()
            kept = _lines_before(first_step, text, self._path)
            if kept != text:
                _replace_file(self._path, kept)
        self._file = self._path.open("a")

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one step, `record["step"]`, which must be the next; NaN and infinity become null (JSON)."""
        step = record["step"]
        assert step == self._next_step, f"step {step} was written where step {self._next_step} is due"
        self._file.write(json_line(record))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._next_step += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TensorBoardWriter:
    """Scalars for TensorBoard in `tb/`; needs the `tensorboard` extra."""

    def __init__(self, run_dir: Path, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run_dir / "tb"), purge_step=first_step or None)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write every number of a step's record, numbers of nested objects as `outer/inner`."""
        for name, value in _numbers(record):
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_config(run_dir: Path, dump: Mapping[str, Any]) -> Path:
    """Write the resolved configuration (`model_dump(mode="json")`) to `config.json`; returns the file."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "config.json"
    _replace_file(path, json.dumps(dump, indent=2, ensure_ascii=False) + "\n")
    return path


def _lines_before(first_step: int, text: str, path: Path) -> str:
    """The complete lines of steps before `first_step`, which must be consecutive and end just before it."""
    kept: list[str] = []
    last_step: int | None = None
    # Without its newline the last piece is a torn line, or nothing.
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        step = _step_of(line)
        if step is None or (last_step is not None and step != last_step + 1):
            expected = "a step's metrics" if last_step is None else f"the metrics of step {last_step + 1}"
            raise _bad_metrics(f"{path}:{number}", line[:60], expected)
        last_step = step
        if step < first_step:
            kept.append(line + "\n")
    if kept and last_step is not None and last_step < first_step - 1:
        raise _bad_metrics(str(path), f"last step {last_step}", f"last step {first_step - 1} or later")
    return "".join(kept)


def _step_of(line: str) -> int | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None


def _bad_metrics(where: str, got: str, expected: str) -> ResumeError:
    return ResumeError(
        Problem(
            id="metrics-file",
            message="the metrics of this run folder do not continue to the step resumed from",
            fix="give a new folder with --run-dir, or repair the file",
            option="--run-dir",
            where=where,
            got=got,
            expected=expected,
        )
    )


def _numbers(record: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name not in ("step", "time"):
            yield prefix + name, float(value)


def _replace_file(path: Path, text: str) -> None:
    """Write `text` to a temporary name beside `path`, onto the disk, then give it the name."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
