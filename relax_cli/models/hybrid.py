"""Sizes of models that go through Megatron-Bridge: Qwen3.5, whose layers mostly have linear attention.

Known before a launch, like those of `model_spec`; the model itself is built by the bridge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_cli.models.spec import (
    BRIDGE_FAMILIES,
    SIZES,
    ModelSpec,
    plain_spec,
    read_json,
    read_spec,
    require_counts,
    unsupported,
    well_formed,
)

LINEAR_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


@dataclass(frozen=True)
class HybridSpec(ModelSpec):
    """A decoder of gated linear attention (arXiv:2412.06464), with gated full attention in every few layers."""

    full_attention_layers: int
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    """Size of one key head."""
    linear_value_dim: int
    conv_kernel: int
    vision_parameters: int
    """Of the vision tower, which text training loads and leaves as it is; 0 for a text-only model."""

    @property
    def untrained_parameters(self) -> int:
        """Parameters that are loaded, but get no gradient."""
        return self.vision_parameters

    @property
    def cached_layers(self) -> int:
        """Layers whose keys and values are kept for every token."""
        return self.full_attention_layers

    @property
    def answers_early(self) -> bool:
        """The bridge's last layer is like the others."""
        return False

    @property
    def state_bytes(self) -> int:
        """fp32 state and bf16 convolution window of linear attention, in all layers of one sequence."""
        state = 4 * self.linear_value_heads * self.linear_key_dim * self.linear_value_dim
        window = 2 * (2 * self._linear_keys + self._linear_values) * (self.conv_kernel - 1)
        return (self.num_layers - self.full_attention_layers) * (state + window)

    def attention_numbers(self, tensor_parallel: int) -> int:
        """See `ModelSpec`; also of linear attention."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        # Full attention: as `ModelSpec`, and the output gate before and after its sigmoid.
        full = (7 * queries + 4 * keys) // tensor_parallel
        mixed = 2 * self._linear_keys + self._linear_values
        # Linear attention: projections before and after the convolution, the gate, the scan's output and its norm.
        linear = (3 * mixed + 4 * self._linear_values) // tensor_parallel
        linear_layers = self.num_layers - self.full_attention_layers
        return self.full_attention_layers * full + linear_layers * linear

    def _backbone(self, tensor_parallel: int) -> int:
        hidden, queries, keys = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        mlp = 3 * hidden * self.ffn_hidden_size
        # The queries' projection is twice as wide: it computes the output gate, too.
        full = hidden * (3 * queries + 2 * keys)
        mixed, values = 2 * self._linear_keys + self._linear_values, self._linear_values
        linear = hidden * (mixed + 2 * values + 2 * self.linear_value_heads)
        linear += mixed * self.conv_kernel + 2 * self.linear_value_heads
        linear_layers = self.num_layers - self.full_attention_layers
        split = self.num_layers * mlp + self.full_attention_layers * full + linear_layers * linear
        norms = self.num_layers * 2 * hidden + hidden
        norms += self.full_attention_layers * 2 * self.head_dim + linear_layers * self.linear_value_dim
        return self.vocabulary_of_rank(tensor_parallel) * hidden + split // tensor_parallel + norms

    @property
    def _linear_keys(self) -> int:
        return self.linear_key_heads * self.linear_key_dim

    @property
    def _linear_values(self) -> int:
        return self.linear_value_heads * self.linear_value_dim


def read_any_spec(folder: Path) -> ModelSpec:
    """What `config.json` in `folder` describes, for our own families and for those of Megatron-Bridge.

    Raises:
        ConfigError: see `read_spec`.
    """
    path = folder / "config.json"
    whole = read_json(path)
    if whole.get("model_type") not in BRIDGE_FAMILIES:
        return read_spec(folder)
    with well_formed(path):
        text = language_config(whole)
        require_counts(path, text, (*SIZES, *LINEAR_SIZES))
        return HybridSpec(
            **vars(plain_spec(path, text | {"model_type": whole["model_type"]})) | {"qk_norm": True},
            full_attention_layers=_full_attention_layers(path, text),
            linear_key_heads=text["linear_num_key_heads"],
            linear_value_heads=text["linear_num_value_heads"],
            linear_key_dim=text["linear_key_head_dim"],
            linear_value_dim=text["linear_value_head_dim"],
            conv_kernel=text["linear_conv_kernel_dim"],
            vision_parameters=_vision_parameters(whole.get("vision_config")),
        )


def language_config(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `config.json` about the language model, which files of multimodal models nest."""
    nested = whole.get("text_config")
    if not isinstance(nested, dict):
        return dict(whole)
    # Whether embeddings are tied is said outside.
    return {"tie_word_embeddings": whole.get("tie_word_embeddings", False)} | nested


def _full_attention_layers(path: Path, text: Mapping[str, Any]) -> int:
    kinds = text.get("layer_types")
    if kinds is None:
        return int(text["num_hidden_layers"]) // int(text.get("full_attention_interval", 4))
    if len(kinds) != text["num_hidden_layers"] or set(kinds) - {"linear_attention", "full_attention"}:
        expected = f"{text['num_hidden_layers']} times linear_attention or full_attention"
        raise unsupported(path, "layer_types", sorted(set(kinds)), expected)
    return int(kinds.count("full_attention"))


def _vision_parameters(vision: Mapping[str, Any] | None) -> int:
    """Exact number of parameters of the vision tower, with the defaults of files that leave values out."""
    if vision is None:
        return 0
    hidden, inner = int(vision.get("hidden_size", 1152)), int(vision.get("intermediate_size", 4304))
    out, merged = int(vision.get("out_hidden_size", 3584)), hidden * int(vision.get("spatial_merge_size", 2)) ** 2
    patch = int(vision.get("in_channels", 3)) * int(vision.get("temporal_patch_size", 2))
    patch *= int(vision.get("patch_size", 16)) ** 2
    block = 4 * hidden * (hidden + 1) + 2 * hidden * inner + inner + hidden + 4 * hidden
    merger = 2 * hidden + merged * (merged + 1) + (merged + 1) * out
    positions = int(vision.get("num_position_embeddings", 2304)) * hidden
    return (patch + 1) * hidden + positions + int(vision.get("depth", 27)) * block + merger
