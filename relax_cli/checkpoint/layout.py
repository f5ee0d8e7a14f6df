"""Names and small files of a checkpoint folder. Knows neither torch nor Megatron, so reading it is instant.

    <save>/iter_0000040/                         model, optimizer, schedule: Megatron's sharded files
    <save>/iter_0000040/relax.json               what this checkpoint is, and size and sha256 of every file
    <save>/latest_checkpointed_iteration.txt     the tracker: which iteration counts
    <save>/best_checkpoint.json                  which one --keep-best keeps, by which metric

An iteration is a number of finished rollouts. While it is written a checkpoint has a temporary name, so a folder with a
final name is complete unless something damaged it later.

What is read here may have been written by anybody: nothing is unpickled, no path leads out of the checkpoint, and
neither a pipe nor a huge file can block the reader.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, ConfigDict, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from relax_cli.errors import ResumeError, problem_kind
from relax_cli.models.files import check_regular

META_UNREADABLE = problem_kind(
    "checkpoint-meta-unreadable",
    "Folders and checkpoints",
    "`relax.json` of a checkpoint is missing, damaged, has a value of another type, or is of a newer relax.",
)

TRACKER_FILE = "latest_checkpointed_iteration.txt"
BEST_FILE = "best_checkpoint.json"
META_FILE = "relax.json"
FORMAT_VERSION = 2
"""Format 1 kept the random state as a pickled object among the shards; no release wrote it."""

MOST_META_BYTES = 64 << 20
MOST_HASHED_BYTES = 4 << 30
"""Checkpoints whose hashes are compared whenever one is chosen: a second or two."""
MOST_TRACKER_BYTES = 4096

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


def list_leftovers(save_dir: Path) -> list[Path]:
    """What interrupted writes and removals left, under temporary names."""
    return sorted(save_dir.glob(".iter_*.tmp*"))


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
        text = read_small_file(path, MOST_TRACKER_BYTES).decode("utf-8").strip()
    except FileNotFoundError:
        return Tracker(None)
    except (OSError, UnicodeDecodeError) as error:
        return Tracker(None, f"{path} cannot be read: {error}")
    if text == "release":
        return Tracker("release")
    if re.fullmatch(r"[0-9]{1,12}", text):
        return Tracker(int(text))
    return Tracker(None, f"{path} contains {text[:40]!r}, neither a number nor `release`")


def write_tracker(save_dir: Path, iteration: int) -> None:
    """Replace the tracker in one atomic step."""
    replace_file(save_dir / TRACKER_FILE, f"{iteration}\n")


@dataclass(frozen=True)
class Best:
    """The checkpoint that `--keep-best` keeps."""

    metric: str
    value: float
    iteration: int

    def __str__(self) -> str:
        return f"iteration {self.iteration} is the best by {self.metric} ({self.value:.6g})"


def read_best(save_dir: Path) -> Best | None:
    """What the folder says is its best checkpoint; None where it says nothing that can be understood."""
    try:
        return TypeAdapter(Best).validate_json(read_small_file(save_dir / BEST_FILE, MOST_TRACKER_BYTES), strict=True)
    except (OSError, ValidationError):
        return None


def write_best(save_dir: Path, best: Best) -> None:
    """Replace what the folder says in one atomic step."""
    replace_file(save_dir / BEST_FILE, json.dumps(asdict(best)) + "\n")


def inside(path: object) -> str:
    """A path of a checkpoint's records. Raises ValueError: by its name it may lead out of the checkpoint's folder."""
    if isinstance(path, str) and 0 < len(path) < 256 and "\0" not in path and "\\" not in path:
        parts = PurePosixPath(path)
        if not parts.is_absolute() and ".." not in parts.parts:
            return path
    raise ValueError(f"it names a file outside the checkpoint: {path!r:.200}")


STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    path: Annotated[str, AfterValidator(inside)]
    """Relative to the checkpoint folder."""
    size: NonNegativeInt
    sha256: str


@dataclass(frozen=True)
class CheckpointMeta:
    """Content of `relax.json`."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    role: str
    iteration: NonNegativeInt
    weight_version: NonNegativeInt
    seeds: dict[str, int]
    config_hash: str
    parallel: dict[str, PositiveInt]
    """Parallel sizes it was written with; it also loads at others."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What else the run wants back; see `KnownExtra`."""
    files: tuple[FileEntry, ...] = ()
    random_state: tuple[dict[str, Any], ...] = ()
    """State of the random generators of every rank, in rank order, as the model gave it."""
    format_version: int = FORMAT_VERSION

    @property
    def save(self) -> tuple[str, str | None]:
        """What tells one save of one run from all others; both halves of a pair have it."""
        return self.config_hash, self.extra.get("save_id")

    def recorded(self, group: str, name: str) -> str | None:
        """A text in a group of `extra`; older versions wrote fewer."""
        value = self.extra.get(group, {}).get(name)
        return None if value is None else str(value)


@with_config(ConfigDict(extra="allow", strict=True))
class KnownExtra(TypedDict, total=False):
    """The keys of `CheckpointMeta.extra` that are read; older versions wrote fewer."""

    estimator: str
    fingerprints: dict[str, str | None]
    model_shape: dict[str, Any] | None
    origin: dict[str, str | None]
    prompts: NonNegativeInt | None
    shuffle: bool
    curriculum: str
    prompts_in_flight: PositiveInt
    carried_samples_per_prompt: PositiveInt
    data_position: dict[str, NonNegativeInt | None]
    adapters: dict[str, dict[str, Any]]
    has_critic: bool
    critic_save: str | None
    save_id: str
    run_id: str


_META = TypeAdapter(CheckpointMeta)
_KNOWN_EXTRA = TypeAdapter(KnownExtra)


def write_meta(folder: Path, meta: CheckpointMeta) -> None:
    """Write `relax.json` of a checkpoint."""
    replace_file(folder / META_FILE, json.dumps(asdict(meta), indent=2) + "\n")


def read_meta(folder: Path) -> CheckpointMeta:
    """`relax.json` of a checkpoint.
    Raises ResumeError: it is missing, damaged, of another format, or names a file outside the checkpoint."""
    path = folder / META_FILE
    try:
        content = read_small_file(path, MOST_META_BYTES)
        version = json.loads(content)["format_version"]
        if version != FORMAT_VERSION:
            raise ValueError(f"it has format {str(version)[:20]}, this relax reads format {FORMAT_VERSION}")
        meta = _META.validate_json(content)
        _KNOWN_EXTRA.validate_python(meta.extra)
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        reason = f"unexpected content ({error})" if isinstance(error, KeyError | TypeError) else str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            reason = f"{'.'.join(str(part)[:40] for part in first['loc'])}: {first['msg']}"
        problem = META_UNREADABLE(
            f"{META_FILE} of the checkpoint cannot be used: {reason}",
            fix="resume from another iteration, or from a copy of this one",
            where=str(path),
            got=reason,
            expected=f"the {META_FILE} that relax wrote",
        )
        raise ResumeError(problem) from error
    return meta


def list_files(folder: Path) -> list[Path]:
    """Every file of a checkpoint but `relax.json`, relative, sorted."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path != Path(META_FILE))


def describe_file(folder: Path, path: Path) -> FileEntry:
    """Size and hash of one file of a checkpoint."""
    return FileEntry(path.as_posix(), (folder / path).stat().st_size, sha256_of(folder / path))


def sha256_of(path: Path) -> str:
    """Hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damages(folder: Path, *, deep: bool = False) -> list[str]:
    """What is wrong with the files of a checkpoint, one sentence each; with `deep`, also their hashes are checked.
    Raises ResumeError: `relax.json` itself cannot be used."""
    entries = read_meta(folder).files
    found = strays(folder)
    damaged = (damage_of(folder, entry, deep=deep and not found) for entry in entries)
    return [*found, *filter(None, damaged)]


def damage_of(folder: Path, entry: FileEntry, *, deep: bool) -> str | None:
    """What is wrong with one file of a checkpoint; see `damages`."""
    path = folder / entry.path
    try:
        if not path.is_file():
            return f"{entry.path} is missing"
        if (size := path.stat().st_size) != entry.size:
            return f"{entry.path} has {size} bytes instead of {entry.size}"
        if deep and sha256_of(path) != entry.sha256:
            return f"{entry.path} has changed since it was written"
    except OSError as error:
        return f"{entry.path} cannot be read: {error.strerror}"
    return None


def strays(folder: Path) -> list[str]:
    """Names in a checkpoint that are not its own files: links that lead out of the folder, which may be a link itself,
    pipes, devices."""
    home = folder.resolve()
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_symlink() and not path.resolve().is_relative_to(home):
            found.append(f"{name} is a link that leads out of the checkpoint")
        elif not (path.is_file() or path.is_dir() or path.is_symlink()):
            found.append(f"{name} is neither a file nor a folder")
    return found


def is_complete(folder: Path) -> bool:
    """Whether `relax.json` is readable and every file it lists is there in full size."""
    try:
        return not damages(folder)
    except ResumeError:
        return False


def complete_iterations(save_dir: Path) -> list[int]:
    """Iterations with a complete checkpoint, ascending."""
    return [i for i in list_iterations(save_dir) if is_complete(iteration_folder(save_dir, i))]


def remove_checkpoint(folder: Path) -> None:
    """Take the final name away first: a folder that has it must be complete. A link goes, not what it leads to."""
    doomed = folder.with_name(f".{folder.name.removeprefix('.')}.tmp-old")
    if doomed.exists() or doomed.is_symlink():
        remove_tree(doomed)
    folder.rename(doomed)
    remove_tree(doomed)


def remove_leftovers(save_dir: Path) -> None:
    """Remove what interrupted writes and removals left."""
    for leftover in list_leftovers(save_dir):
        remove_tree(leftover)


def remove_tree(path: Path) -> None:
    """Remove a file, a link or a folder with its content."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)


def read_small_file(path: Path, most_bytes: int) -> bytes:
    """Content of a regular file of at most `most_bytes`.
    Raises OSError: also where it is not a regular file, or larger."""
    check_regular(path, most_bytes)
    return path.read_bytes()


def replace_file(path: Path, text: str) -> None:
    """Write `path` so that a reader, or a crash, sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
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
