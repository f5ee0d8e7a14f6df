"""The files of a run folder: `config.json` and `metrics.jsonl`."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_cli.checkpoint.layout import fsync_folder, replace_file
from relax_cli.errors import ResumeError, problem_kind
from relax_cli.roles.sample_files import json_line

METRICS_FILE = problem_kind(
    "metrics-file",
    "Folders and checkpoints",
    "The metrics file of a run that is resumed cannot be read or continued.",
    option="--run-dir",
)


class MetricsWriter:
    """Appends one JSON object per step to `metrics.jsonl`; a line is on the disk when `write` returns.

    Opened with the number of finished steps. Later lines and a torn last line are from a run that was aborted after
    its last checkpoint: they are dropped, since those steps run again. So are all lines when nothing is finished.
    """

    def __init__(self, run_dir: Path, done: int = 0) -> None:
        """Open the file, which may not exist yet.
        Raises ResumeError: its last step is before step `done`, or it is not a metrics file."""
        self._path = run_dir / "metrics.jsonl"
        self._done = done
        self.last: dict[str, Any] | None = None
        """The newest record; None in a file without any."""
        self._late: list[dict[str, str]] = []
        """Warnings that no record has yet."""
        if self._path.exists():
            kept = _kept_lines(self._path, done)
            self.last = json.loads(kept[-1]) if kept else None
        self._file = self._path.open("a", encoding="utf-8")
        fsync_folder(run_dir)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the next step, `record["step"]`, or add an evaluation to the newest; NaN and infinity become null."""
        step = record["step"]
        if self.last is not None and step == self.last["step"] and is_evaluation(record):
            self._amend(record)
            return
        expected = self._done + 1 if self.last is None else self.last["step"] + 1
        starts = self.last is None and step == self._done  # with the evaluation before the first step
        assert starts or step == expected, f"step {step} was written where step {expected} is due"
        whole = dict(record) | self._warnings(record)
        self._file.write(json_line(whole))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.last = whole

    def warn(self, text: str) -> None:
        """Keep a warning for the record of the next step, or for the newest one when no step follows."""
        self._late.append({"seen": text})

    def _warnings(self, record: Mapping[str, Any]) -> dict[str, Any]:
        found, self._late = [*record.get("warnings", ()), *self._late], []
        return {"warnings": found} if found else {}

    def _amend(self, record: Mapping[str, Any]) -> None:
        assert self.last is not None, "there is a newest record"
        self.last |= {name: value for name, value in record.items() if name != "time"}
        before, _, _ = self._path.read_text("utf-8").removesuffix("\n").rpartition("\n")
        self._file.close()
        replace_file(self._path, (before and before + "\n") + json_line(self.last))
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        if self._late and self.last is not None:
            # The disk that a warning is about may refuse it: a person has seen it on the screen.
            with contextlib.suppress(OSError):
                self._amend(self._warnings(self.last))
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
            return
        self._late = []  # The newest line may be torn.
        # What could not be written before cannot be written now, either: the first failure is the one to report.
        with contextlib.suppress(OSError):
            self.close()


def is_evaluation(record: Mapping[str, Any]) -> bool:
    """Whether a record has the metrics of an evaluation alone."""
    names = record.keys() - {"step", "time"}
    return bool(names) and all(name.startswith("eval/") for name in names)


def write_config(run_dir: Path, dump: Mapping[str, Any]) -> Path:
    """Write the resolved configuration (`model_dump(mode="json")`) to `config.json`; returns the file."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "config.json"
    replace_file(path, json.dumps(dump, indent=2, ensure_ascii=False) + "\n")
    return path


def _kept_lines(path: Path, done: int) -> list[str]:
    """The complete lines of the first `done` steps, which must be consecutive; the file is cut to them."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _bad_metrics(path, str(error), "a text file with one JSON object per line") from None
    kept: list[str] = []
    last_step: int | None = None
    # Without its newline the last piece is a torn line, or nothing.
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        step = None
        with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
            step = json.loads(line)["step"]
        if not isinstance(step, int) or (last_step is not None and step != last_step + 1):
            expected = "a step's metrics" if last_step is None else f"the metrics of step {last_step + 1}"
            raise _bad_metrics(path, line[:60], expected, number)
        last_step = step
        if step <= done and done:
            kept.append(line + "\n")
    if kept and last_step is not None and last_step < done:
        raise _bad_metrics(path, f"last step {last_step}", f"last step {done} or later")
    if "".join(kept) != text:
        replace_file(path, "".join(kept))
    return kept


def _bad_metrics(path: Path, got: str, expected: str, line: int | None = None) -> ResumeError:
    return ResumeError(
        METRICS_FILE(
            "the metrics of this run folder do not continue to the step resumed from",
            fix=f"--run-dir {shlex.quote(f'{path.parent}-2')}",
            where=str(path) if line is None else f"{path}:{line}",
            got=got,
            expected=expected,
        )
    )
