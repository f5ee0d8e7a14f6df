"""Names and small files of a checkpoint folder. Knows neither torch nor Megatron, so reading it is instant.

    <save>/iter_0000040/                         model, optimizer, schedule: Megatron's sharded files
    <save>/iter_0000040/relax.json               what this checkpoint is, and size and sha256 of every file
    <save>/latest_checkpointed_iteration.txt     the tracker: which iteration counts

An iteration is a number of finished rollouts. While it is written a checkpoint has a temporary name, so a folder with a
final name is complete unless something damaged it later.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from relax_cli.errors import Problem, ResumeError

TRACKER_FILE = "latest_checkpointed_iteration.txt"
META_FILE = "relax.json"
FORMAT_VERSION = 1

Iteration: TypeAlias = int | Literal["release"] | None
"""A number of finished rollouts, `release` for weights that no run counted, or None where there is no checkpoint."""


def iteration_folder(save_dir: Path, iteration: int) -> Path:
    """Final name of a checkpoint."""
    return save_dir / f"iter_{iteration:07d}"


def temporary_folder(save_dir: Path, iteration: int) -> Path:
    """Name of a checkpoint while it is written."""
    return save_dir / f".iter_{iteration:07d}.tmp"


def list_iterations(save_dir: Path) -> list[int]:
    """Iterations with a folder of final name, ascending."""
    if not save_dir.is_dir():
        return []
    matches = (re.fullmatch(r"iter_(\d{7,})", path.name) for path in save_dir.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


@dataclass(frozen=True)
class Tracker:
    """What the tracker file says, or why it says nothing."""

    iteration: Iteration
    problem: str | None = None
    """Why the file cannot be understood; None when it can, or when there is none."""


def read_tracker(save_dir: Path) -> Tracker:
    """The tracker of `save_dir`; a missing folder or file is a Tracker without iteration and without problem."""
    path = save_dir / TRACKER_FILE
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return Tracker(None)
    except (OSError, UnicodeDecodeError) as error:
        return Tracker(None, f"{path} cannot be read: {error}")
    if text == "release":
        return Tracker("release")
    if re.fullmatch(r"[0-9]{1,12}", text):
        return Tracker(int(text))
    return Tracker(None, f"{path} holds {text[:40]!r}, neither a number nor `release`")


def write_tracker(save_dir: Path, iteration: int) -> None:
    """Replace the tracker in one atomic step."""
    replace_file(save_dir / TRACKER_FILE, f"{iteration}\n")


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    path: str
    """Relative to the checkpoint folder."""
    size: int
    sha256: str


@dataclass(frozen=True)
class CheckpointMeta:
    """Content of `relax.json`."""

    role: str
    iteration: int
    weight_version: int
    seeds: dict[str, int]
    config_hash: str
    parallel: dict[str, int]
    """Parallel sizes it was written with; it loads at others too."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Whatever else the run wants back, for example its data position."""
    files: tuple[FileEntry, ...] = ()
    format_version: int = FORMAT_VERSION


def write_meta(folder: Path, meta: CheckpointMeta) -> None:
    """Write `relax.json` of a checkpoint."""
    replace_file(folder / META_FILE, json.dumps(asdict(meta), indent=2) + "\n")


def read_meta(folder: Path) -> CheckpointMeta:
    """`relax.json` of a checkpoint.

    Raises:
        ResumeError: it is missing, damaged, or of a newer format.
    """
    path = folder / META_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        version = raw["format_version"]
        if version > FORMAT_VERSION:
            raise _bad_meta(path, f"it has format {version}, this relax knows up to {FORMAT_VERSION}")
        files = tuple(FileEntry(**entry) for entry in raw.pop("files"))
        return CheckpointMeta(files=files, **raw)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _bad_meta(path, str(error)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise _bad_meta(path, f"unexpected content ({error})") from error


def _bad_meta(path: Path, reason: str) -> ResumeError:
    return ResumeError(
        Problem(
            id="checkpoint-meta-unreadable",
            message=f"{META_FILE} of the checkpoint cannot be used: {reason}",
            fix="resume from another iteration, or from a copy of this one",
            where=str(path),
        )
    )


def list_files(folder: Path) -> list[Path]:
    """Every file of a checkpoint but `relax.json`, relative, sorted."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path != Path(META_FILE))


def describe_files(folder: Path) -> tuple[FileEntry, ...]:
    """Sizes and hashes of every file but `relax.json`."""
    return tuple(
        FileEntry(path.as_posix(), (folder / path).stat().st_size, sha256_of(folder / path))
        for path in list_files(folder)
    )


def sha256_of(path: Path) -> str:
    """Hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damages(folder: Path, *, deep: bool = False) -> list[str]:
    """What is wrong with the files of a checkpoint, one sentence each; with `deep`, their hashes are checked too.

    Raises:
        ResumeError: `relax.json` itself cannot be used.
    """
    found = []
    for entry in read_meta(folder).files:
        path = folder / entry.path
        if not path.is_file():
            found.append(f"{entry.path} is missing")
        elif path.stat().st_size != entry.size:
            found.append(f"{entry.path} has {path.stat().st_size} bytes instead of {entry.size}")
        elif deep and sha256_of(path) != entry.sha256:
            found.append(f"{entry.path} has changed since it was written")
    return found


def is_complete(folder: Path) -> bool:
    """Whether `relax.json` is readable and every file it lists is there in full size."""
    try:
        return not damages(folder)
    except ResumeError:
        return False


def replace_file(path: Path, text: str) -> None:
    """Write `path` so that a reader, or a crash, sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make a file's content durable."""
    fsync_folder(path)
