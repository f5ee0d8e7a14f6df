"""An actor's checkpoint as a Hugging Face model folder. Needs torch, but neither Megatron nor ranks."""

from __future__ import annotations

import json
import shlex
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded

from relax_cli.checkpoint import layout, safe_load
from relax_cli.checkpoint.align import resumable
from relax_cli.checkpoint.fingerprint import adapters_in, folder_differences
from relax_cli.checkpoint.folders import storage_failed
from relax_cli.errors import ConfigError, ResumeError, problem_kinds
from relax_cli.models.convert import EXPERTS, hf_tensors, hf_to_megatron, megatron_to_hf, merged, rank_tensors
from relax_cli.models.hf import HfWeights, write_hf
from relax_cli.models.lora import HF_MODULES, Lora
from relax_cli.models.spec import ModelSpec, read_spec

declare = problem_kinds("Folders and checkpoints")
OUT_IN_USE = declare(
    "export-out-in-use", "`relax checkpoint export-hf` writes into a new or empty folder.", option="OUT"
)
WRONG_ROLE = declare(
    "export-wrong-role", "Only an actor is a language model; a critic has a scalar head.", option="DIR"
)
DAMAGED = declare(
    "export-damaged",
    "A file of the checkpoint is missing, cut, or has another hash than when it was written.",
    option="DIR",
)
NO_ADAPTERS = declare(
    "export-no-adapters",
    "`relax checkpoint export-hf --peft` writes low-rank adapters, and the checkpoint has none.",
    option="--peft",
)

UNFINISHED = ".unfinished-export"
"""Folder in the one that is written to, while the export is incomplete."""
LAST = ("config.json", "adapter_config.json")
OPTIMIZER = "optimizer."
LAYERS = "decoder.layers."
"""Megatron keeps the tensors of all layers under one name, stacked."""
STACKED_EXPERTS = "mlp.experts.experts."
"""The same of all experts in a layer."""
PARAMETERS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Names of a layer in a checkpoint that are not the parameter's own."""


@dataclass(frozen=True)
class Exported:
    """What was written; `size` are the bytes of all files."""

    folder: Path
    dtype: str
    parameters: int
    size: int


def export_hf(
    checkpoint: Path, out: Path, model_folder: Path, dtype: torch.dtype | None = None, *, peft: bool = False
) -> Exported:
    """Write the policy of a checkpoint, at whatever parallelism it was saved, as a folder that transformers loads.

    Args:
        out: is made; must be empty.
        model_folder: `config.json` and tokenizer files come from there, and the weights that adapters are merged into.
        dtype: type of the weights; None: that of the checkpoint.
        peft: write its low-rank adapters alone, as a folder that PEFT loads.

    Raises:
        ConfigError: `out` is not empty, `model_folder` cannot be used or is of another model, or there are no adapters.
        ResumeError: the checkpoint is damaged, or not an actor's.
        RunError: the disk refused.
    """
    # The rest of an interrupted export does not count.
    if out.exists() and not (out.is_dir() and {path.name for path in out.iterdir()} <= {UNFINISHED}):
        problem = OUT_IN_USE(
            "the folder to write to is not empty",
            fix=f"choose another folder, for example {shlex.quote(f'{out.absolute()}-2')}",
            got=str(out),
            expected="a new or empty folder",
        )
        raise ConfigError(problem)
    lora = adapters_in(_refuse_unfit(checkpoint, model_folder))
    if peft and lora is None:
        problem = NO_ADAPTERS(
            "the checkpoint has no low-rank adapters: every weight was trained",
            fix="leave --peft out",
            where=str(checkpoint),
            got="a checkpoint of whole weights",
            expected="one of a run with --lora-rank",
        )
        raise ConfigError(problem)
    spec = read_spec(model_folder)
    with safe_load.taken_over_from(checkpoint):
        saved = dict(_parameters(_read_model(checkpoint), spec))
        if peft:
            weights = dict(_as_peft(saved, spec))
        else:
            full = saved if lora is None else dict(_merged(saved, lora, spec, model_folder))
            weights = dict(megatron_to_hf(full, spec))
    if not peft:
        # The conversion back looks at every name and shape; on the meta device it costs nothing.
        hf_to_megatron({name: tensor.to("meta") for name, tensor in weights.items()}, spec, 1, 0)
    kept = next(iter(weights.values())).dtype if dtype is None else dtype
    with _finished_in(out) as folder:
        named = {name: tensor.to(kept) for name, tensor in weights.items()}
        if peft and lora is not None:
            _write_peft(folder, named, lora, model_folder)
        else:
            write_hf(folder, named.items(), model_folder)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return Exported(out, str(kept).removeprefix("torch."), sum(tensor.numel() for tensor in weights.values()), size)


def _refuse_unfit(checkpoint: Path, model_folder: Path) -> layout.CheckpointMeta:
    """`relax.json` of a complete checkpoint, hash for hash, of an actor on this model; else raises ResumeError."""
    meta = layout.read_meta(checkpoint)
    if meta.role != "actor":
        problem = WRONG_ROLE(
            f"this is a checkpoint of the {meta.role}; only an actor's is a language model",
            fix="give the folder that --save named",
            where=str(checkpoint),
            got=f"role {meta.role}",
            expected="role actor",
        )
        raise ResumeError(problem)
    if found := layout.damages(checkpoint, deep=True):
        older = next(resumable(checkpoint.absolute().parent, deep=True), None)
        problem = DAMAGED(
            f"the checkpoint is damaged: {found[0]}",
            fix=f"--iteration {older}" if older is not None else "give a copy of the folder that is whole",
            where=str(checkpoint),
            got=found[0],
            expected="every file as it was written",
        )
        raise ResumeError(problem)
    if other := list(folder_differences(model_folder, meta, checkpoint, str(model_folder))):
        raise ResumeError(other)
    return meta


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
        number, _, rest = inner.partition(".")
        if inner == name:
            yield name, tensor
        elif number.isdecimal():
            yield from _of_layer(number, rest, tensor)
        elif len(tensor) != spec.num_layers:
            raise ValueError(f"it has {len(tensor)} layers, the model {spec.num_layers}")
        else:
            for layer, part in enumerate(tensor):
                yield from _of_layer(layer, inner, part)


def _of_layer(layer: int | str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    inner = name.removeprefix(STACKED_EXPERTS)
    if inner == name:
        yield f"{LAYERS}{layer}.{PARAMETERS.get(name, name)}", tensor
    else:
        for number, expert in enumerate(tensor):
            yield f"{LAYERS}{layer}.mlp.{EXPERTS}{number}.{inner}", expert


def _merged(
    adapters: Mapping[str, Tensor], lora: Lora, spec: ModelSpec, model_folder: Path
) -> Iterator[tuple[str, Tensor]]:
    """The weights below adapters, in the adapters' type, with these merged into them as in training."""
    dtype = next(iter(adapters.values())).dtype
    for name, weight in rank_tensors(HfWeights(model_folder), spec, 1, 0):
        stem = name.removesuffix("weight")
        a, b = adapters.get(f"{stem}lora_a"), adapters.get(f"{stem}lora_b")
        yield name, weight.to(dtype) if a is None or b is None else merged(weight.to(dtype), a, b, lora.scale)


def _as_peft(adapters: Mapping[str, Tensor], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """PEFT's names: each Hugging Face module gets its rows of `B`, and a copy of the `A` that it shares."""
    for name, b in adapters.items():
        stem = name.removesuffix("lora_b")
        if stem != name:
            for hf, rows in hf_tensors(f"{stem}weight", b, spec):
                module = f"base_model.model.{hf.removesuffix('.weight')}"
                yield f"{module}.lora_A.weight", adapters[f"{stem}lora_a"].clone()
                yield f"{module}.lora_B.weight", rows.contiguous()


def _write_peft(folder: Path, weights: Mapping[str, Tensor], lora: Lora, model_folder: Path) -> None:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_folder.absolute()),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [hf.rpartition(".")[2] for target in lora.targets for hf in HF_MODULES[target]],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    folder.mkdir(parents=True)
    save_file(dict(weights), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _finished_in(out: Path) -> Iterator[Path]:
    """A temporary folder inside `out`, whose files move there in the end; `config.json` last, when all is complete.
    `out` itself is never replaced: it may be a link, a mount, or a folder in use."""
    temporary, is_new = out / UNFINISHED, not out.exists()
    try:
        if temporary.exists():
            shutil.rmtree(temporary)
        yield temporary
        for path in temporary.rglob("*"):
            layout.fsync_file(path)
        for path in sorted(temporary.iterdir(), key=lambda path: path.name in LAST):
            path.rename(out / path.name)
        temporary.rmdir()
        layout.fsync_folder(out)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(out if is_new else temporary, ignore_errors=True)
        raise storage_failed(error, out) from error
