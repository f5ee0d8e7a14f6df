"""Sizes of models that go through Megatron-Bridge: Qwen3.5, whose layers mostly have linear attention.

Known before a launch, like those of `model_spec`; the model itself is built by the bridge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_cli.models.families import BRIDGE_FAMILIES, completed, require_counts, unsupported
from relax_cli.models.files import CONFIG_FILE
from relax_cli.models.spec import ModelSpec, plain_spec, read_config, read_spec


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
        return self.vision_parameters

    @property
    def cached_layers(self) -> int:
        return self.full_attention_layers

    @property
    def answers_early(self) -> bool:
        return False  # The bridge's last layer is like the others.

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
        # The queries' projection is twice as wide: it also computes the output gate.
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
    Raises ConfigError: see `read_spec`."""
    path, whole = folder / CONFIG_FILE, read_config(folder)
    if whole.get("model_type") not in BRIDGE_FAMILIES:
        return read_spec(folder)
    # What the bridge does with other keys is up to the bridge, but the weights must be plain numbers everywhere.
    completed(path, whole)
    full = completed(path, language_config(whole) | {"model_type": whole["model_type"]})
    return HybridSpec(
        **vars(plain_spec(path, full)) | {"qk_norm": True},
        full_attention_layers=_full_attention_layers(path, full),
        linear_key_heads=full["linear_num_key_heads"],
        linear_value_heads=full["linear_num_value_heads"],
        linear_key_dim=full["linear_key_head_dim"],
        linear_value_dim=full["linear_value_head_dim"],
        conv_kernel=full["linear_conv_kernel_dim"],
        vision_parameters=_vision_parameters(path, whole.get("vision_config")),
    )


def language_config(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `config.json` about the language model, which files of multimodal models nest."""
    nested = whole.get("text_config")
    if not isinstance(nested, dict):
        return dict(whole)
    # Whether embeddings are tied is said outside.
    return {"tie_word_embeddings": whole.get("tie_word_embeddings", False)} | nested


def _full_attention_layers(path: Path, text: Mapping[str, Any]) -> int:
    kinds, layers = text.get("layer_types"), text["num_hidden_layers"]
    if kinds is None:
        interval = text.get("full_attention_interval", 4)
        require_counts(path, {"full_attention_interval": interval}, ["full_attention_interval"])
        return int(layers) // int(interval)
    known = ("linear_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise unsupported(path, "layer_types", kinds, f"{layers} times {' or '.join(known)}")
    return int(kinds.count("full_attention"))


VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 3584,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "temporal_patch_size": 2,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "depth": 27,
}
"""What transformers takes for values of the vision tower that are left out."""


def _vision_parameters(path: Path, vision: object) -> int:
    """Exact number of parameters of the vision tower."""
    if vision is None:
        return 0
    if not isinstance(vision, dict):
        raise unsupported(path, "vision_config", vision, "a JSON object")
    sizes = {key: vision.get(key, default) for key, default in VISION.items()}
    require_counts(path, sizes, VISION)
    hidden, inner, out = sizes["hidden_size"], sizes["intermediate_size"], sizes["out_hidden_size"]
    merged = hidden * sizes["spatial_merge_size"] ** 2
    patch = sizes["in_channels"] * sizes["temporal_patch_size"] * sizes["patch_size"] ** 2
    block = 4 * hidden * (hidden + 1) + 2 * hidden * inner + inner + hidden + 4 * hidden
    merger = 2 * hidden + merged * (merged + 1) + (merged + 1) * out
    return int((patch + 1 + sizes["num_position_embeddings"]) * hidden + sizes["depth"] * block + merger)
