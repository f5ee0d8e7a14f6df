"""Weights to begin with: a model's tensors in a sharded checkpoint, whoever wrote it and at whatever parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from relax_cli.backends.megatron import checkpointing
from relax_cli.checkpoint import safe_load
from relax_cli.checkpoint.store import gather
from relax_cli.errors import ResumeError, problem_kind

OTHER_MODEL = problem_kind(
    "weights-other-model",
    "Folders and checkpoints",
    "The run starts from bare weights whose tensors are not those of `--hf-checkpoint`.",
    option="--load",
)

HEAD = "output_layer."
"""Of a policy over the vocabulary, of a value model its scalar."""
MODEL_PREFIXES = ("embedding.", "decoder.", HEAD)
"""Of the names that the tensors of a model have in a checkpoint; others are an optimizer's."""
LEAST_PADDING = 128
"""Megatron rounds a vocabulary up to a multiple of this, times a power of two of ranks."""
MOST_SHOWN = 3

Shape = tuple[int, ...]


def load_into(model: Any, folder: Path, *, with_head: bool) -> None:
    """Replace the weights of a Megatron model by those in `folder`; without `with_head` the output layer stays: a value
    model's, which no policy has. Every rank calls this.
    Raises ResumeError: the tensors are not those of this model, or are damaged, or contain code."""
    left_out = () if with_head else (HEAD,)
    state = {
        name: value
        for name, value in model.sharded_state_dict(metadata=checkpointing.sharding_metadata()).items()
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
    refuse_other_shapes(*_of_all_ranks(state), saved, folder)
    loaded = checkpointing.load({"model": state}, folder, only_weights=True)
    with checkpointing.taken_over_from(folder):
        model.load_state_dict(loaded["model"], strict=False)


def refuse_other_shapes(
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
    rows, multiple = wanted[0], LEAST_PADDING
    while multiple <= 2 * saved[0]:
        if saved == (-(-rows // multiple) * multiple, *wanted[1:]):
            return True
        multiple *= 2
    return False


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
