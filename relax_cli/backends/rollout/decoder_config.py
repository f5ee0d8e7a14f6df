"""What the decoder needs to know of a Hugging Face config, and the rotary table that follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relax_cli.errors import Problem, RunError

FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class DecoderConfig:
    """What the forward pass needs to know of an HF config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: dict[str, Any]
    """HF's `rope_parameters`: `rope_type`, `rope_theta` and what the type needs."""

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> DecoderConfig:
        """Read the dict of a `transformers` (>= 5) config object, which has the defaults filled in.

        Raises:
            RunError: the model computes something this decoder does not.
        """
        family, rope = hf["model_type"], hf["rope_parameters"]
        if family not in FAMILIES:
            raise _unsupported("model_type", family, " or ".join(FAMILIES))
        if hf["hidden_act"] != "silu":
            raise _unsupported("hidden_act", hf["hidden_act"], "silu")
        if "sliding_attention" in (hf.get("layer_types") or ()):
            raise _unsupported("layer_types", "sliding_attention", "full_attention")
        if rope["rope_type"] not in ("default", "linear", "llama3"):
            raise _unsupported("rope_type", rope["rope_type"], "default, linear or llama3")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise _unsupported("partial_rotary_factor", rope["partial_rotary_factor"], "1.0")
        attention_bias = family != "qwen2" and hf["attention_bias"]
        return cls(
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=hf["num_attention_heads"],
            num_kv_heads=hf["num_key_value_heads"],
            head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            max_positions=hf["max_position_embeddings"],
            norm_eps=hf["rms_norm_eps"],
            tied=hf["tie_word_embeddings"],
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=attention_bias,
            mlp_bias=family == "llama" and hf["mlp_bias"],
            qk_norm=family == "qwen3",
            rope=dict(rope),
        )

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of float32 keys and values of one position of one row."""
        return 2 * 4 * self.num_layers * self.num_kv_heads * self.head_dim


def _unsupported(key: str, got: object, expected: str) -> RunError:
    return RunError(
        Problem(
            id="model-unsupported",
            message=f"the embedded rollout engine cannot run a model with {key} {got!r}",
            fix="choose a supported model for --hf-checkpoint",
            option="--hf-checkpoint",
            where="config.json",
            got=str(got),
            expected=expected,
        )
    )


def rotations(config: DecoderConfig, length: int) -> Tensor:
    """`exp(i * position * frequency)` as complex64 `[length, D/2]`, computed as HF computes cos and sin."""
    rope, dim = config.rope, config.head_dim
    frequency = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if rope["rope_type"] == "linear":
        frequency = frequency / rope["factor"]
    elif rope["rope_type"] == "llama3":
        frequency = _llama3_frequency(frequency, rope)
    angle_SD = torch.arange(length).float()[:, None] * frequency
    return torch.complex(angle_SD.cos(), angle_SD.sin())


def _llama3_frequency(frequency: Tensor, rope: dict[str, Any]) -> Tensor:
    """Llama 3.1 scaling: slow frequencies divided by `factor`, fast ones kept, a smooth ramp between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = frequency * (rope["original_max_position_embeddings"] / (2 * math.pi))
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    scaled: Tensor = frequency * (keep + (1.0 - keep) / rope["factor"])
    return scaled
