"""An actor's checkpoint as a Hugging Face model folder. Needs torch, but neither Megatron nor ranks."""

from __future__ import annotations

import shlex
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
from relax_cli.checkpoint.align import examine
from relax_cli.checkpoint.store import storage_failed
from relax_cli.errors import ConfigError, ResumeError, problem_kind
from relax_cli.models.convert import hf_to_megatron, megatron_to_hf
from relax_cli.models.hf import write_hf
from relax_cli.models.spec import ModelSpec, read_spec

OUT_IN_USE = problem_kind(
    "export-out-in-use",
    "Folders and checkpoints",
    "`relax checkpoint export-hf` writes into a new or empty folder.",
    option="OUT",
)
WRONG_ROLE = problem_kind(
    "export-wrong-role",
    "Folders and checkpoints",
    "Only an actor is a language model; a critic has a scalar head.",
    option="DIR",
)
DAMAGED = problem_kind(
    "export-damaged",
    "Folders and checkpoints",
    "A file of the checkpoint is missing, cut, or has another hash than when it was written.",
    option="DIR",
)

UNFINISHED = ".unfinished-export"
"""Folder in the one that is written to, while the export is incomplete."""
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
        out: is made; must be empty.
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
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    count = sum(tensor.numel() for tensor in weights.values())
    return Exported(out, str(kept).removeprefix("torch."), count, size)


def refuse_in_use(out: Path) -> None:
    """Raises ConfigError where `out` is a file, or not empty; the rest of an interrupted export does not count."""
    if out.exists() and not (out.is_dir() and {path.name for path in out.iterdir()} <= {UNFINISHED}):
        raise ConfigError(
            OUT_IN_USE(
                "the folder to write to is not empty",
                fix=f"choose another folder, for example {shlex.quote(f'{out.absolute()}-2')}",
                got=str(out),
                expected="a new or empty folder",
            )
        )


def refuse_unfit(checkpoint: Path) -> None:
    """Raises ResumeError where a checkpoint is not a complete one of an actor, hash for hash."""
    meta = layout.read_meta(checkpoint)
    if meta.role != "actor":
        raise ResumeError(
            WRONG_ROLE(
                f"this is a checkpoint of the {meta.role}; only an actor's is a language model",
                fix="give the folder that --save named",
                where=str(checkpoint),
                got=f"role {meta.role}",
                expected="role actor",
            )
        )
    found = layout.damages(checkpoint, deep=True)
    if found:
        save_dir = checkpoint.absolute().parent
        candidates = (i for i in reversed(layout.list_iterations(save_dir)) if i != meta.iteration)
        older = next((i for i in candidates if examine(save_dir, i, "actor", deep=True)[1] is None), None)
        raise ResumeError(
            DAMAGED(
                f"the checkpoint is damaged: {found[0]}",
                fix=f"--iteration {older}" if older is not None else "give a copy of the folder that is whole",
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
    """Everything in a temporary folder inside `out` first; `config.json` leaves it last, when the rest is complete.

    `out` itself is never replaced: it may be a link, a mount, or a folder in use.
    """
    temporary, is_new = out / UNFINISHED, not out.exists()
    try:
        if temporary.exists():
            shutil.rmtree(temporary)
        write_hf(temporary, named, model_folder)
        for path in temporary.rglob("*"):
            layout.fsync_file(path)
        for path in sorted(temporary.iterdir(), key=lambda path: path.name == "config.json"):
            path.rename(out / path.name)
        temporary.rmdir()
        layout.fsync_folder(out)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(out if is_new else temporary, ignore_errors=True)
        raise storage_failed(error, out) from error
