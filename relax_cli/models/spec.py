"""What a Hugging Face `config.json` says about a model. Knows no torch, so that it can be asked before a launch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_cli.errors import ConfigError, Problem

FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of `model_type` that our own exact converter covers."""
BRIDGE_FAMILIES = ("qwen3_5", "qwen3_5_text")
"""Values of `model_type` that go through Megatron-Bridge (`backends/megatron/bridge.py`)."""


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

    @property
    def parameters(self) -> int:
        """Exact number of the policy's parameters."""
        return self.parameters_of_rank(1)

    @property
    def value_parameters(self) -> int:
        """Exact number of the critic's parameters: the same backbone under a head of one output with a bias."""
        return self.value_parameters_of_rank(1)

    def parameters_of_rank(self, tensor_parallel: int) -> int:
        """Policy parameters of one of `tensor_parallel` ranks: matrices are split, norms are on every rank."""
        output = 0 if self.tied else self.vocabulary_of_rank(tensor_parallel) * self.hidden_size
        return self._backbone(tensor_parallel) + output

    def value_parameters_of_rank(self, tensor_parallel: int) -> int:
        """Critic parameters of one rank; the value head is on every rank."""
        return self._backbone(tensor_parallel) + self.hidden_size + 1

    def core_attention_numbers(self, tensor_parallel: int) -> int:
        """The part of `attention_numbers` that is not kept where core attention is computed again: rotated q and k."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return self.cached_layers * ((2 * queries + keys) // tensor_parallel)

    def vocabulary_of_rank(self, tensor_parallel: int) -> int:
        """Rows of the embedding on one rank: all ranks have equally many, so the last may have some without a token."""
        return -(-self.vocab_size // tensor_parallel)

    @property
    def untrained_parameters(self) -> int:
        """Parameters that are loaded, but get no gradient; counted nowhere else."""
        return 0

    @property
    def cached_layers(self) -> int:
        """Layers whose keys and values are kept for every token while text is generated."""
        return self.num_layers

    @property
    def answers_early(self) -> bool:
        """Whether only states that predict response tokens go through the last layer's MLP, not all up to the head."""
        return True

    @property
    def state_bytes(self) -> int:
        """What generation keeps of a sequence besides keys and values, however long it is."""
        return 0

    def attention_numbers(self, tensor_parallel: int) -> int:
        """Numbers that the attention of all layers keeps of one token on one rank for the backward pass.

        q, k, v and the output; v is a view that keeps the fused tensor, the output is copied when heads are joined.
        Norms of q and k keep their outputs, too. The norm before the attention is not counted here.
        """
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shared = 4 * queries + 3 * keys + (queries + keys if self.qk_norm else 0)
        return self.num_layers * (shared // tensor_parallel)

    def _backbone(self, tensor_parallel: int) -> int:
        hidden, queries, keys = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        matrices = hidden * (2 * queries + 2 * keys + 3 * self.ffn_hidden_size)
        biases = queries + 2 * keys if self.qkv_bias else 0
        norms = 2 * hidden + (2 * self.head_dim if self.qk_norm else 0)
        layers = self.num_layers * ((matrices + biases) // tensor_parallel + norms)
        return self.vocabulary_of_rank(tensor_parallel) * hidden + layers + hidden


def read_spec(folder: Path) -> ModelSpec:
    """What `config.json` in `folder` describes, for the families of our own converter.

    Raises:
        ConfigError: no readable `config.json`, an unknown family, or a feature that is not implemented.
    """
    path = folder / "config.json"
    config = read_json(path)
    family = config.get("model_type")
    if family not in FAMILIES:
        raise unsupported(path, "model_type", family, " or ".join(FAMILIES))
    _refuse_unsupported(path, config)
    with well_formed(path):
        return plain_spec(path, config)


@contextmanager
def well_formed(path: Path) -> Iterator[None]:
    """Turns what reading values of a wrong type raises into a ConfigError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise unsupported(
            path, "config.json", f"{type(error).__name__}: {error}", "complete and well-formed"
        ) from error


def plain_spec(path: Path, config: Mapping[str, Any]) -> ModelSpec:
    """The values of `config` as they stand; whether they can be trained is judged before."""
    family = config["model_type"]
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


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model folder.

    Raises:
        ConfigError: it cannot be read, or holds no object.
    """
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
        raise unsupported(path, path.name, type(value).__name__, "a JSON object")
    return value


def unsupported(path: Path, key: str, got: object, expected: str) -> ConfigError:
    """The error that a value of `config.json` is not one that can be trained."""
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


SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size")


def require_counts(path: Path, config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises ConfigError where one of the named values is not a positive integer."""
    for key in names:
        if type(config.get(key)) is not int or config[key] < 1:
            raise unsupported(path, key, config.get(key), "a positive integer")


def _refuse_unsupported(path: Path, config: Mapping[str, Any]) -> None:
    require_counts(path, config, SIZES)
    for key in ("use_sliding_window", "attention_bias", "mlp_bias"):
        if config.get(key, False):
            raise unsupported(path, key, config[key], "false")
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise unsupported(path, "layer_types", "sliding_attention", "full_attention only")
    if config.get("hidden_act", "silu") != "silu":
        raise unsupported(path, "hidden_act", config["hidden_act"], "silu")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise unsupported(path, "partial_rotary_factor", config["partial_rotary_factor"], "1.0")


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
    raise unsupported(path, "rope_type", kind, "default, linear or llama3")
