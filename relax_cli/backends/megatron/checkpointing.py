"""Sharded checkpoints of a training model in Megatron's format (`megatron.core.dist_checkpointing`, `torch_dist`).

They load at another parallel layout, and a model's tensors alone also from another program's. Files are written by this
process, by another thread for `--async-save`: Megatron's own writer starts helper processes that each import torch.
They are read without unpickling anything that could run (`checkpoint/safe_load.py`), which Megatron's own reader does.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
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
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factory_merges
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
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.serialization import set_crc32_options

from relax_cli.backends.megatron import parallel
from relax_cli.checkpoint import safe_load
from relax_cli.checkpoint.folders import storage_failed
from relax_cli.checkpoint.hashing import HashingFileSystem
from relax_cli.checkpoint.layout import FileEntry
from relax_cli.checkpoint.store import Group, gather, on_first_rank
from relax_cli.errors import ResumeError, problem_kind

OTHER_MODEL = problem_kind(
    "weights-other-model",
    "Folders and checkpoints",
    "The run starts from bare weights whose tensors are not those of `--hf-checkpoint`.",
    option="--load",
)

EXTRA_STATE = "_extra_state"
"""What TransformerEngine stores with its weights for fp8; local layers have none. It is unpickled by the layer, so
only empty values are loaded."""

HEAD = "output_layer."
"""Of a policy over the vocabulary, of a value model its scalar."""
MODEL_PREFIXES = ("embedding.", "decoder.", HEAD)
"""Of the names that the tensors of a model have in a checkpoint; others are an optimizer's."""
LEAST_PADDING = 128
"""Megatron rounds a vocabulary up to a multiple of this, times a power of two of ranks."""
MOST_SHOWN = 3

Shape = tuple[int, ...]


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


def load_weights(model: Any, folder: Path, *, with_head: bool) -> None:
    """Replace the weights of a Megatron model by those in `folder`; without `with_head` the output layer stays: a value
    model's, which no policy has. Every rank calls this.
    Raises ResumeError: the tensors are not those of this model, or are damaged, or contain code."""
    left_out = () if with_head else (HEAD,)
    state = {
        name: value
        for name, value in model.sharded_state_dict(metadata=sharding_metadata()).items()
        # The others are objects that layers keep next to weights, which another program would have pickled.
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and not name.startswith(left_out)
    }
    saved = {
        name: tuple(entry.size)
        for name, entry in safe_load.read_metadata(folder).state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        and name.startswith(MODEL_PREFIXES)
        and not name.startswith(left_out)
    }
    _refuse_other_shapes(*_of_all_ranks(state), saved, folder)
    loaded = load({"model": state}, folder, only_weights=True)
    with taken_over_from(folder):
        model.load_state_dict(loaded["model"], strict=False)


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
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


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


def _refuse_other_shapes(
    wanted: Mapping[str, Shape], resizable: frozenset[str], saved: Mapping[str, Shape], folder: Path
) -> None:
    """Raises ResumeError: a tensor that a model needs is missing in a checkpoint, left over, or of another shape,
    unless its rows are the vocabulary (`resizable`) and were padded by Megatron."""
    differing = sorted(
        name
        for name in wanted.keys() & saved.keys()
        if wanted[name] != saved[name] and not (name in resizable and _is_padded(wanted[name], saved[name]))
    )
    missing, unknown = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    if not (differing or missing or unknown):
        return
    got = [f"{name} {saved[name]}" for name in differing]
    got += [f"no {name}" for name in missing] + [f"{name}, unknown to the model" for name in unknown]
    expected = [f"{name} {wanted[name]}" for name in (*differing, *missing)]
    raise ResumeError(
        OTHER_MODEL(
            "the weights are not those of the model in --hf-checkpoint",
            where=str(folder),
            got=_shown(got),
            expected=_shown(expected) or "the tensors of the model and no others",
            fix="give --hf-checkpoint the folder with the config.json of these weights",
        )
    )


def _is_padded(wanted: Shape, saved: Shape) -> bool:
    """Whether rows were only added, to the next multiple of a number of ranks."""
    multiples = (LEAST_PADDING << doublings for doublings in range(saved[0].bit_length()))
    return any(saved == (-(-wanted[0] // multiple) * multiple, *wanted[1:]) for multiple in multiples)


def _of_all_ranks(state: Mapping[str, Any]) -> tuple[dict[str, Shape], frozenset[str]]:
    """Whole shapes by name of all stages, and which of them follow the vocabulary."""
    built = [value.build() if isinstance(value, ShardedTensorFactory) else value for value in state.values()]
    parts = [part for part in nested_values(built) if isinstance(part, ShardedTensor)]
    mine = [(part.key, tuple(part.global_shape), bool(part.allow_shape_mismatch)) for part in parts]
    entries = [entry for of_rank in gather(mine) for entry in of_rank]
    return {key: shape for key, shape, _ in entries}, frozenset(key for key, _, resizable in entries if resizable)


def _shown(texts: list[str]) -> str:
    more = f", and {len(texts) - MOST_SHOWN} more" if len(texts) > MOST_SHOWN else ""
    return ", ".join(texts[:MOST_SHOWN]) + more
