"""Sharded checkpoints of a training model in Megatron's format (`megatron.core.dist_checkpointing`, `torch_dist`).

They load at another parallel layout. Files are written by this process, by another thread for
`--async-save`: Megatron's own writer starts helper processes that each import torch. They are read without unpickling
anything that could run (`checkpoint/safe_load.py`), which Megatron's own reader does.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    maybe_load_config,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.serialization import set_crc32_options

from relax_cli.backends.megatron import parallel
from relax_cli.checkpoint import safe_load
from relax_cli.checkpoint.folders import storage_failed
from relax_cli.checkpoint.hashing import HashingFileSystem
from relax_cli.checkpoint.layout import FileEntry
from relax_cli.checkpoint.store import Group, on_first_rank

FORMAT = ("torch_dist", 1)
EXTRA_STATE = "_extra_state"
"""What TransformerEngine stores with its weights for fp8; local layers have none. It is unpickled by the layer, so
only empty values are loaded."""


def prepare(state: dict[str, Any], *, copied: bool) -> Callable[[Path, Group], list[FileEntry]]:
    """Take sharded `state`, as a copy in host memory if it may change meanwhile. Every rank takes part.

    The returned function writes it into a folder that exists and is empty, in a group of all ranks; it returns the
    files that this rank wrote, hashed on the way, but for the small ones of the first rank. It raises RunError on every
    rank when writing failed on any.
    """
    sharded, common = save_preprocess(state)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    if copied:
        for shard in (shard for shards in by_key.values() for shard in shards if isinstance(shard, ShardedTensor)):
            shard.data = shard.data.detach().to("cpu", copy=True)
    tensors = mcore_to_pyt_state_dict(by_key, is_loading=False)

    def write(folder: Path, group: Group) -> list[FileEntry]:
        on_first_rank(lambda: _save_common(common, folder), group)
        writer = FileSystemWriter(folder, thread_count=1)
        writer.fs = files = HashingFileSystem()
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        try:
            set_crc32_options(False)  # The check sums inside files: sha256 covers these whole.
            save_sharded(tensors, storage_writer=writer, planner=planner, process_group=group)
        except (OSError, CheckpointException) as error:
            raise storage_failed(safe_load.root_of(error), folder) from error
        return files.entries()

    return write


def load(state: dict[str, Any], folder: Path, *, only_weights: bool = False) -> dict[str, Any]:
    """Read what `state` requests, and what the checkpoint contains once.

    The steps are those of Megatron's own `load`, whose ways to give it other readers change between versions.

    Args:
        only_weights: read nothing else, also from a checkpoint of another program, which keeps its own objects next to
            the shards; the caller has seen to it that no row of the vocabulary is missing.

    Raises:
        ResumeError: the checkpoint is damaged, belongs to another model, or contains code.
    """
    with taken_over_from(folder):
        if maybe_load_config(str(folder)) is None:
            raise CheckpointingException(f"{folder} is not a distributed checkpoint")
        loaded = {} if only_weights else safe_load.load_common(folder)
        requested, local, factories = load_preprocess(state)
        merge(loaded, local)
        sharded, _ = extract_sharded_base(requested)
        validate_sharding_integrity(determine_global_metadata(sharded)[1])
        merge(loaded, _read(sharded, folder, padded_vocabulary=only_weights))
        result: dict[str, Any] = apply_factory_merges(loaded, factories)
    return result


def taken_over_from(folder: Path) -> AbstractContextManager[None]:
    """Raises ResumeError for whatever goes wrong with the content of a checkpoint."""
    return safe_load.taken_over_from(folder, CheckpointingException)


def sharded_model(model: torch.nn.Module) -> dict[str, Any]:
    """The part of a model that goes into a checkpoint, the same for every kind of layers."""
    state: dict[str, Any] = model.sharded_state_dict(metadata=sharding_metadata())  # type: ignore[operator]
    return {name: value for name, value in state.items() if not name.endswith(EXTRA_STATE)}


def load_model(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Load what `sharded_model` requested from a checkpoint."""
    missing, unexpected = model.load_state_dict(state, strict=False)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    left = [name for name in {*missing, *unexpected} - frozen if not name.endswith(EXTRA_STATE)]
    assert not left, left


def sharding_metadata() -> dict[str, Any]:
    """What Megatron's `sharded_state_dict` methods want to know."""
    return {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}


def parallel_layout() -> dict[str, int]:
    """Sizes of the groups that a model is spread over: they decide which rank has what."""
    # Older checkpoints know nothing of the last three.
    others = {"pipeline": parallel.STAGE, "context": parallel.CONTEXT, "expert": parallel.EXPERT}
    layout = {"tensor_parallel": parallel.TENSOR.size, "data_parallel": parallel.DATA.size}
    return layout | {f"{name}_parallel": split.size for name, split in others.items() if split.size > 1}


def _save_common(common: dict[str, Any], folder: Path) -> None:
    content = io.BytesIO()
    torch.save(common, content)
    # torch reports a full disk as an error of its own kind, Python as an OSError.
    (folder / safe_load.COMMON_FILE).write_bytes(content.getbuffer())
    save_config(CheckpointingConfig(*FORMAT), str(folder))


def _read(requested: dict[str, Any], folder: Path, *, padded_vocabulary: bool) -> dict[str, Any]:
    """Megatron's tensors and metadata, read by `SafeReader`."""
    tensors = [value for value in nested_values(requested) if isinstance(value, ShardedTensor)]
    padded = {t.key: t for t in tensors if t.allow_shape_mismatch and padded_vocabulary}
    by_key, flattened, renamed = _replace_state_dict_keys_with_sharded_keys(requested)
    state = mcore_to_pyt_state_dict(by_key, is_loading=True)
    planner = _PlainObjects(
        shapes_validation_sharded_tensors=[t for t in tensors if t.key not in padded],
        allow_shape_mismatch_sharded_tensors=padded,
    )
    load_sharded(state, storage_reader=safe_load.SafeReader(folder), planner=planner)
    plain = {name: _unwrap_pyt_sharded_tensor(value) for name, value in state.items()}
    loaded: dict[str, Any] = _replace_sharded_keys_with_state_dict_keys(plain, flattened, renamed)
    _restore_dict_types(loaded, requested)
    return loaded


class _PlainObjects(MCoreLoadPlanner):  # type: ignore[misc]
    """Reads the objects among the shards as plain values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        place = Path(name)
        loaded = safe_load.load_plain(value.getvalue(), place)
        parts = loaded if isinstance(loaded, list) else [loaded]
        is_empty = all(part is None or (isinstance(part, Tensor) and part.numel() == 0) for part in parts)
        if EXTRA_STATE in name and not is_empty:
            raise safe_load.unsafe(place, f"{name} is not empty, and would be unpickled by the layer it is for")
        self.original_state_dict[name] = loaded
