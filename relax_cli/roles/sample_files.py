"""The samples of a run: `rollouts/step_000001.zip`, and `step_000001-1.zip` of a second rollout worker; `evals/` alike.

| in the file | |
|---|---|
| samples.jsonl | one JSON object per sample: texts, reward, whatever is not one number per token |
| NAME.npy | the numbers NAME of all samples, one sample after the other |
| NAME.len.npy | how many of them each sample has |

So `unzip -p FILE samples.jsonl` shows the texts, and `numpy.load(FILE)["values"]` the numbers. As JSON text the numbers
took seven times the room and the time (benchmarks/samples.py); `.jsonl` files of former versions are read all the same.
"""

from __future__ import annotations

import json
import math
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias, get_args

import numpy as np

from relax_cli.checkpoint.layout import fsync_folder
from relax_cli.errors import ConfigError, problem_kind
from relax_cli.roles.run_folder import run_folder_errors

SAMPLES_UNREADABLE = problem_kind(
    "samples-unreadable",
    "Folders and checkpoints",
    "A file of samples in a run folder is damaged, or is not one that relax wrote.",
)

Sample: TypeAlias = dict[str, Any]
"""One sample; one number per token as a numpy array."""
Folder: TypeAlias = Literal["rollouts", "evals"]
TEXTS = "samples.jsonl"
TRAINED_FIELDS = {"actor": "train_log_probs", "critic": "train_values"}
"""What a role that learns writes to the queue for these files: the numbers that it saw when it learned."""
_NAME = re.compile(r"step_(\d+)(?:-\d+)?\.(?:zip|jsonl)")
_PER_TOKEN = re.compile(r".*(_token_ids|log_probs|values|advantages|returns)")
"""Fields of `.jsonl` files that are arrays."""


class SampleWriter:
    """Writes the samples of one worker, a file for each step, while the caller does something else."""

    def __init__(self, run_dir: Path, folder: Folder = "rollouts", part: int = 0) -> None:
        """Args:
        part: of each step's samples that this writer gets; other workers write the others.
        """
        self._run_dir = run_dir
        self._folder = run_dir / folder
        self._ending = f"-{part}.zip" if part else ".zip"
        self._thread = ThreadPoolExecutor(1, "samples")
        self._writing: Future[None] | None = None
        with run_folder_errors(run_dir):
            self._folder.mkdir(parents=True, exist_ok=True)

    def start(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Begin to write a file, which gets its name when it is complete; the one before is on the disk by now."""
        self.wait()
        path = self._path(step)
        with run_folder_errors(self._run_dir):
            file = path.with_name(f".{path.name}.tmp").open("wb")
        self._writing = self._thread.submit(self._write, file, path, samples)

    def wait(self) -> None:
        """Wait until everything is on the disk. Raises RunError: it could not be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def write(self, step: int, samples: Sequence[Mapping[str, Any]]) -> Path:
        """`start` and `wait`; returns the file."""
        self.start(step, samples)
        self.wait()
        return self._path(step)

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}{self._ending}"

    def _write(self, file: BinaryIO, path: Path, samples: Sequence[Mapping[str, Any]]) -> None:
        with run_folder_errors(self._run_dir):
            with file:
                _write_zip(file, samples)
                file.flush()
                os.fsync(file.fileno())
            os.replace(file.name, path)
            fsync_folder(self._folder)


def sample_files(run_dir: Path, folder: Folder = "rollouts") -> dict[int, list[Path]]:
    """The files of each step, ascending."""
    found: dict[int, list[Path]] = {}
    for path in sorted((run_dir / folder).glob("step_*")):
        if match := _NAME.fullmatch(path.name):
            found.setdefault(int(match[1]), []).append(path)
    return dict(sorted(found.items()))


def read_samples(paths: Iterable[Path], *, numbers: bool = True) -> list[Sample]:
    """The samples of a step, in the order of their rows; without numbers per token in a fraction of the time.
    Raises ConfigError: a file is damaged."""
    samples = [sample for path in paths for sample in _read_file(path, numbers)]
    return sorted(samples, key=lambda sample: int(sample.get("row", 0)))


def drop_samples(run_dir: Path, done: int) -> None:
    """Delete sample files of steps after `done`, which an aborted run left; all when nothing is done."""
    for folder in get_args(Folder):
        for step, paths in sample_files(run_dir, folder).items():
            for path in paths if step > done or not done else ():
                path.unlink()


def json_line(record: Mapping[str, Any]) -> str:
    """One object of a JSONL file; NaN and infinity become null."""
    return json.dumps(finite(record), ensure_ascii=False, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """The value as JSON may have it: numbers that are not finite are None, arrays are lists."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def _write_zip(file: BinaryIO, records: Sequence[Mapping[str, Any]]) -> None:
    arrays = {name: None for record in records for name, value in record.items() if isinstance(value, np.ndarray)}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        texts = "".join(json_line({k: v for k, v in record.items() if k not in arrays}) for record in records)
        archive.writestr(TEXTS, texts.encode("utf-8", "backslashreplace"))
        for name in arrays:
            values = [record[name] for record in records]
            for member, array in (
                (f"{name}.npy", np.concatenate(values)),
                (f"{name}.len.npy", np.array([value.size for value in values], dtype=np.int64)),
            ):
                with archive.open(member, "w", force_zip64=True) as stream:
                    np.lib.format.write_array(stream, array, allow_pickle=False)


def _read_file(path: Path, numbers: bool) -> list[Sample]:
    try:
        if path.suffix == ".jsonl":
            return [_with_arrays(json.loads(line), numbers) for line in path.read_bytes().splitlines()]
        with path.open("rb") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as archive:
            assert archive.zip is not None, "it is open"
            samples: list[Sample] = [json.loads(line) for line in archive.zip.read(TEXTS).splitlines()]
            names = [name for name in archive.files if name != TEXTS and not name.endswith(".len")]
            for name in names if numbers else ():
                flat, ends = archive[name], np.cumsum(archive[f"{name}.len"])
                if len(ends) != len(samples) or flat.size != (ends[-1] if samples else 0):
                    raise ValueError(f"{name} does not fit the samples")
                for sample, values in zip(samples, np.split(flat, ends[:-1]), strict=True):
                    sample[name] = values
        return samples
    except (OSError, ValueError, KeyError, EOFError, RecursionError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(
            SAMPLES_UNREADABLE(
                "the samples of this step cannot be read",
                where=str(path),
                got=str(error),
                expected="a file that relax wrote",
                fix="choose another step with --step",
            )
        ) from error


def _with_arrays(record: Any, numbers: bool) -> Sample:
    if not isinstance(record, dict):
        raise ValueError("a line is not an object")
    for name in [name for name, value in record.items() if isinstance(value, list) and _PER_TOKEN.fullmatch(name)]:
        values = record.pop(name)
        if numbers:
            kind = np.int32 if name.endswith("_ids") else np.float32
            record[name] = np.array([math.nan if value is None else value for value in values], dtype=kind)
    return record
