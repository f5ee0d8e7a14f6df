"""Hugging Face model folders: what `config.json` describes, and safetensors in and out. Knows no Megatron."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from relax_cli.errors import ConfigError, Problem

FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of `model_type` that can be trained."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 4 << 30


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched; the names of `rope_parameters` in `config.json`."""

    rope_type: str
    """`linear` or `llama3`."""
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer with RMSNorm, rotary positions, grouped-query attention and SwiGLU."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    """Input embedding and output layer share one matrix."""
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_eps: float
    qkv_bias: bool
    qk_norm: bool
    max_positions: int


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Rotary frequencies `[head_dim / 2]` fp32: plain, `linear` or `llama3` scaling, as transformers computes them."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    plain = 1.0 / (spec.rope_theta**exponents)
    scaling = spec.rope_scaling
    if scaling is None:
        return plain
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    # Slow frequencies are divided by the factor, fast ones kept, with a ramp between.
    turns = plain * (scaling.original_max_positions / (2 * math.pi))
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return plain * (keep + (1.0 - keep) / scaling.factor)


def read_spec(folder: Path) -> ModelSpec:
    """What `config.json` in `folder` describes.

    Raises:
        ConfigError: no readable `config.json`, an unknown family, or a feature that is not implemented.
    """
    path = folder / "config.json"
    config = _read_json(path)
    family = config.get("model_type")
    if family not in FAMILIES:
        raise _unsupported(path, "model_type", family, " or ".join(FAMILIES))
    _refuse_unsupported(path, config)
    rope = config.get("rope_parameters") or {}
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return ModelSpec(
        family=family,
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        ffn_hidden_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab_size=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rope_scaling=_read_rope_scaling(path, config),
        rms_eps=config.get("rms_norm_eps", 1e-6),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        max_positions=config.get("max_position_embeddings", 2048),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(
            Problem(
                id="model-folder-unreadable",
                message=f"cannot read {path.name} of the model: {error}",
                fix="give a folder with config.json, safetensors and tokenizer files",
                option="--hf-checkpoint",
                where=str(path),
            )
        ) from error
    if not isinstance(value, dict):
        raise _unsupported(path, path.name, type(value).__name__, "a JSON object")
    return value


def _unsupported(path: Path, key: str, got: object, expected: str) -> ConfigError:
    return ConfigError(
        Problem(
            id="model-unsupported",
            message=f"this model cannot be trained: {key} is {got!r}",
            fix=f"use a model whose {key} is {expected}",
            option="--hf-checkpoint",
            where=str(path),
            got=repr(got),
            expected=expected,
        )
    )


def _refuse_unsupported(path: Path, config: Mapping[str, Any]) -> None:
    required = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size")
    for key in required:
        if not isinstance(config.get(key), int):
            raise _unsupported(path, key, config.get(key), "an integer")
    for key in ("use_sliding_window", "attention_bias", "mlp_bias"):
        if config.get(key, False):
            raise _unsupported(path, key, config[key], "false")
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise _unsupported(path, "layer_types", "sliding_attention", "full_attention only")
    if config.get("hidden_act", "silu") != "silu":
        raise _unsupported(path, "hidden_act", config["hidden_act"], "silu")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported(path, "partial_rotary_factor", config["partial_rotary_factor"], "1.0")


def _read_rope_scaling(path: Path, config: Mapping[str, Any]) -> RopeScaling | None:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_scaling` (before)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    raise _unsupported(path, "rope_type", kind, "default, linear or llama3")


class HfWeights(Mapping[str, Tensor]):
    """The tensors of a model folder by name, read from disk when asked for, as fp32.

    Raises:
        ConfigError: the folder holds no readable safetensors.
    """

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, Path] = {}
        if (folder / INDEX_FILE).exists():
            weight_map = _read_json(folder / INDEX_FILE).get("weight_map", {})
            self._file_of = {name: folder / file for name, file in weight_map.items()}
        else:
            path = folder / SINGLE_FILE
            self._file_of = dict.fromkeys(self._names_in(path), path)

    def __getitem__(self, name: str) -> Tensor:
        path = self._file_of[name]
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name).float()  # type: ignore[no-any-return]
        except (OSError, SafetensorError) as error:
            raise _unreadable(path, error) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    @staticmethod
    def _names_in(path: Path) -> list[str]:
        try:
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        except (OSError, SafetensorError) as error:
            raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        Problem(
            id="model-weights-unreadable",
            message=f"cannot read the weights {path.name}: {error}",
            fix=f"put a complete {SINGLE_FILE} (or shards with {INDEX_FILE}) into the model folder",
            option="--hf-checkpoint",
            where=str(path),
        )
    )


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and fp32 tensors of a model folder, one at a time."""
    yield from HfWeights(folder).items()


def write_hf(folder: Path, named: Iterable[tuple[str, Tensor]], template_folder: Path) -> None:
    """Write a model folder that transformers loads: weights as given; config and tokenizer files as in the template.

    `config.json` gets the type of the weights written. `folder` is made; existing files are overwritten.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for source in sorted(template_folder.iterdir()):
        if source.is_file() and source.suffix in {".json", ".txt", ".model", ".jinja"} and source.name != INDEX_FILE:
            shutil.copyfile(source, folder / source.name)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in named:
        if size and size + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    _write_shards(folder, shards)
    _set_config_dtype(folder / "config.json", next(iter(shards[0].values())).dtype)


def _write_shards(folder: Path, shards: list[dict[str, Tensor]]) -> None:
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE_FILE, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _set_config_dtype(path: Path, dtype: torch.dtype) -> None:
    config = _read_json(path)
    name = str(dtype).removeprefix("torch.")
    for key in ("torch_dtype", "dtype"):
        if key in config:
            config[key] = name
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
