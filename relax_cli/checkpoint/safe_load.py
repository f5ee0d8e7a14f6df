"""Reads torch's distributed checkpoints without running code that others may have written into them.

torch and Megatron unpickle three things when they load: `.metadata` (what lies where), objects among the shards, and
`common.pt`. A pickle can run any code. Here `.metadata` becomes inert records, of which torch's own are then built
field by field; everything else goes through torch's `weights_only` reader, which knows tensors and plain values.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from relax_cli.checkpoint import layout
from relax_cli.errors import RelaxError, ResumeError, problem_kinds

declare = problem_kinds("Folders and checkpoints")
UNSAFE = declare(
    "checkpoint-unsafe",
    "The checkpoint contains what no checkpoint needs: code, a path out of its folder, a pipe. Nothing of it was "
    "executed.",
)
UNLOADABLE = declare(
    "checkpoint-unloadable",
    "The checkpoint does not load into this model, most likely because it belongs to another one.",
)

METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"
MOST_METADATA_BYTES = 1 << 30
MOST_COMMON_BYTES = 1 << 30

CONTENT: tuple[type[BaseException], ...] = (OSError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What reading damaged or foreign content raises."""

KNOWN_NAMES = {
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    # Megatron's own writer also leaves its plan there; nothing reads it again.
    "torch.distributed.checkpoint.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    "pathlib": "Path PosixPath PurePosixPath",
    "collections": "OrderedDict",
    # Marks of older versions of Megatron, without content.
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
}
"""What `.metadata` has a use for, by module. None of it is called or even imported while the file is read."""


def unsafe(where: Path, reason: str) -> ResumeError:
    """The error about a checkpoint that contains what no checkpoint needs."""
    return ResumeError(
        UNSAFE(
            f"the checkpoint is refused: {reason}",
            fix="do not use this folder if it is not yours; take a copy that you trust, or another iteration",
            where=str(where),
            got="nothing of it was executed",
        )
    )


def load_plain(content: bytes, where: Path) -> Any:
    """Tensors and plain values that `torch.save` wrote; tensors on the CPU.
    Raises ResumeError: it contains something else, or is damaged."""
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        reason = "it contains something other than tensors and plain values, or is damaged"
        raise unsafe(where, f"{where.name}: {reason}") from error


def load_common(folder: Path) -> dict[str, Any]:
    """What a checkpoint has once, next to the shards. Raises ResumeError: see `load_plain`; OSError: it is missing."""
    path = folder / COMMON_FILE
    common = load_plain(layout.read_small_file(path, MOST_COMMON_BYTES), path)
    if not isinstance(common, dict):
        raise unsafe(path, f"{path.name} is not a dictionary")
    return common


def read_metadata(folder: Path) -> Metadata:
    """Shapes, types and places of the tensors of a checkpoint.
    Raises ResumeError: the file asks for more than it has a use for, leads out of the folder, or is damaged."""
    path = folder / METADATA_FILE
    try:
        content = layout.read_small_file(path, MOST_METADATA_BYTES)
        fields = _state(_InertUnpickler(io.BytesIO(content)).load(), "Metadata")
        tensors = {_text(name): _build_entry(entry) for name, entry in fields["state_dict_metadata"].items()}
        places = {_build_index(i): _build_place(p) for i, p in fields["storage_data"].items()}
    except RelaxError:
        raise
    except Exception as error:
        # A damaged pickle can fail in any way.
        raise unsafe(path, f"{path.name} cannot be used ({error or type(error).__name__})") from error
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())


@contextmanager
def taken_over_from(folder: Path, *further: type[Exception]) -> Iterator[None]:
    """Raises ResumeError for whatever goes wrong with the content of a checkpoint, and at once where a name in it leads
    out of it, or is not a file.

    Args:
        further: errors of a library that reads it.
    """
    if found := layout.strays(folder):
        raise unsafe(folder, found[0])
    expected: tuple[type[BaseException], ...] = (*CONTENT, CheckpointException, *further)
    try:
        yield
    except RelaxError:
        raise
    except expected as error:
        root = root_of(error)
        if isinstance(root, RelaxError):
            raise root from error
        if isinstance(root, pickle.UnpicklingError):
            raise unsafe(folder, "a shard contains something other than tensors, or is damaged") from error
        reason = (str(root).strip() or type(root).__name__).splitlines()[0]
        problem = UNLOADABLE(
            f"the checkpoint does not load into this model: {reason}",
            fix="check that --hf-checkpoint is the model the run was started with, and that no file is damaged",
            where=str(folder),
        )
        raise ResumeError(problem) from error


def root_of(error: BaseException) -> BaseException:
    """The first rank's own failure, where torch has collected those of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        failure, _ = error.failures[min(error.failures)]
        return failure
    return error


class SafeReader(FileSystemReader):
    """torch's reader of shards, with `read_metadata` of this module.
    Raises ResumeError: at once, see there; torch would try again another way, and log the failure."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._metadata = read_metadata(Path(path))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What was read when this was made."""
        return self._metadata


class _Record:
    """Stands for an object of a class of `.metadata`: arguments and state, as they were written."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    """Makes records of everything, but for numbers' types, which are constants of torch."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._classes: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        constant = vars(torch).get(name) if module == "torch" else None
        if isinstance(constant, torch.dtype):
            return constant
        if name not in KNOWN_NAMES.get(module, "").split():
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a checkpoint has no use for")
        # A class of this one load: whatever a pickle does to it is gone with it.
        return self._classes.setdefault(name, type(name, (dict if name == "OrderedDict" else _Record,), {}))


def _build_entry(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(record).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _state(record, "TensorStorageMetadata")
    dtype = _state(fields["properties"], "TensorProperties")[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor has no number type")
    chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        _size(fields["size"]),
        [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _build_index(record: Any) -> MetadataIndex:
    fields = _state(record, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    place = None if offset is None else _size(offset)
    return MetadataIndex(_text(fields["fqn"]), place, None if index is None else _number(index))


def _build_place(record: Any) -> _StorageInfo:
    fields = _state(record, "_StorageInfo")
    if fields.get("transform_descriptors"):
        raise TypeError("the shards are transformed")
    return _StorageInfo(layout.inside(fields["relative_path"]), _number(fields["offset"]), _number(fields["length"]))


def _state(record: Any, name: str) -> Any:
    """What was written of an object of the class `name`; of another shape than expected, it fails where it is used."""
    if not isinstance(record, _Record) or type(record).__name__ != name:
        raise TypeError(f"something is not a {name}")
    return record.state


def _size(record: Any) -> torch.Size:
    if isinstance(record, _Record):
        (record,) = record.arguments
    return torch.Size([_number(length) for length in record])


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError("a length or an offset is not a whole number")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("a name is not text")
    return value
