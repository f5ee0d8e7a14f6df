"""An actor's checkpoint as a Hugging Face model folder. Needs torch, but neither Megatron nor ranks."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded

from relax_cli.checkpoint import layout, safe_load
from relax_cli.checkpoint.store import storage_failed
from relax_cli.errors import ConfigError, Problem, ResumeError
from relax_cli.models.convert import hf_to_megatron, megatron_to_hf
from relax_cli.models.hf import write_hf
from relax_cli.models.spec import ModelSpec, read_spec

OPTIMIZER = "optimizer."
LAYERS = "decoder.layers."
"""Megatron keeps the tensors of all layers under one name, stacked."""
PARAMETERS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Names of a layer in a checkpoint that are not the parameter's own."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    dtype: str
    parameters: int
    size: int
    """Bytes of all files."""


def export_hf(checkpoint: Path, out: Path, model_folder: Path, dtype: torch.dtype | None = None) -> Exported:
    """Write the policy of a checkpoint, at whatever parallelism it was saved, as a folder that transformers loads.

    Args:
        out: is made; must not hold anything.
        model_folder: `config.json` and tokenizer files come from there.
        dtype: type of the weights; None: that of the checkpoint.

    Raises:
        ConfigError: `out` is not empty, or `model_folder` cannot be used or is of another model.
        ResumeError: the checkpoint is damaged, or not an actor's.
        RunError: the disk refused.
    """
    refuse_in_use(out)
    refuse_unfit(checkpoint)
    spec = read_spec(model_folder)
    with safe_load.taken_over_from(checkpoint):
        full = dict(_parameters(_read_model(checkpoint), spec))
        weights = dict(megatron_to_hf(full, spec))
    # The conversion back looks at every name and shape; on the meta device it costs nothing.
    hf_to_megatron({name: tensor.to("meta") for name, tensor in weights.items()}, spec, 1, 0)
    named = ((name, tensor if dtype is None else tensor.to(dtype)) for name, tensor in weights.items())
    kept = next(iter(weights.values())).dtype if dtype is None else dtype
    _write(out, named, model_folder)
    size = sum(path.stat().st_size for path in out.iterdir())
    count = sum(tensor.numel() for tensor in weights.values())
    return Exported(out, str(kept).removeprefix("torch."), count, size)


def refuse_in_use(out: Path) -> None:
    """Raises ConfigError where `out` is a file, or a folder with something in it."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(
            Problem(
                id="export-out-in-use",
                message="the folder to write to holds something already",
                fix=f"choose another folder, for example {out}-2",
                option="OUT",
                got=str(out),
                expected="a new or empty folder",
            )
        )


def refuse_unfit(checkpoint: Path) -> None:
    """Raises ResumeError where a checkpoint is not a complete one of an actor, hash for hash."""
    meta = layout.read_meta(checkpoint)
    if meta.role != "actor":
        raise ResumeError(
            Problem(
                id="export-wrong-role",
                message=f"this is a checkpoint of the {meta.role}; only an actor's is a language model",
                fix="give the folder that --save named",
                option="DIR",
                where=str(checkpoint),
                got=f"role {meta.role}",
                expected="role actor",
            )
        )
    found = layout.damages(checkpoint, deep=True)
    if found:
        raise ResumeError(
            Problem(
                id="export-damaged",
                message=f"the checkpoint is damaged: {found[0]}",
                fix=f"choose another with --iteration; relax checkpoint list {checkpoint.parent} shows them",
                option="DIR",
                where=str(checkpoint),
                got=found[0],
                expected="every file as it was written",
            )
        )


def _read_model(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors of the model in a checkpoint, whole, by the names they have there."""
    entries = safe_load.read_metadata(checkpoint).state_dict_metadata
    wanted = {
        name: entry
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith(OPTIMIZER)
    }
    size = sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in wanted.values())
    if size > sum(path.stat().st_size for path in checkpoint.glob("*.distcp")):
        raise ValueError("its tensors are larger than its files")
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in wanted.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_sharded(state, storage_reader=safe_load.SafeReader(checkpoint), no_dist=True)
    return state


def _parameters(saved: Mapping[str, Tensor], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Parameters by the names that `convert` knows."""
    for name, tensor in saved.items():
        inner = name.removeprefix(LAYERS)
        if inner == name:
            yield name, tensor
            continue
        number, _, rest = inner.partition(".")
        if number.isdecimal():
            yield f"{LAYERS}{number}.{PARAMETERS.get(rest, rest)}", tensor
            continue
        if len(tensor) != spec.num_layers:
            raise ValueError(f"it has {len(tensor)} layers, the model {spec.num_layers}")
        for layer, part in enumerate(tensor):
            yield f"{LAYERS}{layer}.{PARAMETERS.get(inner, inner)}", part


def _write(out: Path, named: Iterator[tuple[str, Tensor]], model_folder: Path) -> None:
    """Everything under a temporary name first: a folder with the final name is complete."""
    temporary = out.absolute().with_name(f".{out.absolute().name}.tmp")
    try:
        if temporary.exists():
            shutil.rmtree(temporary)
        write_hf(temporary, named, model_folder)
        for path in temporary.iterdir():
            layout.fsync_file(path)
        layout.fsync_folder(temporary)
        temporary.rename(out.absolute())
        layout.fsync_folder(out.absolute().parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise storage_failed(error, out) from error
