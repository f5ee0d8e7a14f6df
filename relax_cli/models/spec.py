"""What a Hugging Face `config.json` says about a model. Knows no torch, so that it can be read before a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_cli.errors import ConfigError, Problem, problem_kind
from relax_cli.models.families import BRIDGE_FAMILIES as BRIDGE_FAMILIES
from relax_cli.models.families import FAMILIES as FAMILIES
from relax_cli.models.families import MOE_FAMILIES as MOE_FAMILIES
from relax_cli.models.families import completed, positive, require_counts, requirement, unsupported
from relax_cli.models.files import CONFIG_FILE, read_json

KNOWN = Path(__file__).parent / "known"

INDIVISIBLE = problem_kind(
    "tensor-parallel-indivisible",
    "Roles, devices, parallelism",
    "The MLP size must be a multiple of the tensor-parallel size. (The vocabulary may have any size: it is padded.)",
    option="--tensor-model-parallel-size",
)


DEFAULT_THETA = 10000.0
_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_NEEDED = {"default": _NUMBERS[:0], "linear": _NUMBERS[:1], "llama3": _NUMBERS}
"""Implemented types, and the numbers that each has."""
_KNOWN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_NUMBERS}
_IMAGES = {"mrope_interleaved", "mrope_section"}
"""How positions of images differ from those of text."""


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

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts together, which expert-parallel ranks share out; the others are on every rank."""
        return 0

    @property
    def active_parameters(self) -> int:
        """Policy parameters that a token uses."""
        return self.parameters

    def mlp_numbers(self, tensor_parallel: int) -> int:
        """Numbers that a layer's MLP keeps of one token on one rank for the backward pass, besides its input."""
        return 3 * (self.ffn_hidden_size // tensor_parallel)

    def mlp_in_flight(self, tensor_parallel: int) -> int:
        """Numbers of one token that a layer's MLP has for a moment in the backward pass, mostly gradients."""
        return 4 * (self.ffn_hidden_size // tensor_parallel)

    def experts_in(self, layer: int) -> int:
        """Experts of a layer; 0 where it has one dense MLP."""
        return 0

    def ffn_size_in(self, layer: int) -> int:
        """Inner size of a layer's MLP, or of each of its experts."""
        return self.ffn_hidden_size

    def attention_numbers(self, tensor_parallel: int) -> int:
        """Numbers that the attention of all layers keeps of one token on one rank for the backward pass.

        q, k, v and the output; v is a view that keeps the fused tensor, the output is copied when heads are joined.
        Norms of q and k also keep their outputs. The norm before the attention is not counted here.
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


@dataclass(frozen=True)
class MoeSpec(ModelSpec):
    """A decoder whose MLPs, but those of some layers, are mixtures of experts: a token uses the best few of them."""

    num_experts: int
    experts_per_token: int
    expert_ffn_size: int
    normalized_routing: bool
    """Whether the weights of a token's experts are divided by their sum."""
    dense_layers: tuple[int, ...]
    """Layers with one MLP for all tokens."""

    @property
    def expert_parameters(self) -> int:
        return self._expert_layers * self.num_experts * self._expert

    @property
    def active_parameters(self) -> int:
        return self.parameters - self._expert_layers * (self.num_experts - self.experts_per_token) * self._expert

    def experts_in(self, layer: int) -> int:
        return 0 if layer in self.dense_layers else self.num_experts

    def ffn_size_in(self, layer: int) -> int:
        return self.expert_ffn_size if self.experts_in(layer) else self.ffn_hidden_size

    def mlp_numbers(self, tensor_parallel: int) -> int:
        """See `ModelSpec`; of a layer with experts, which get equally many tokens on every rank.

        Each of a token's experts keeps its input and output, gate and up, the activation, and that weighed.
        """
        each = 2 * self.hidden_size + 4 * self.expert_ffn_size
        return self.experts_per_token * each // tensor_parallel + 2 * self.num_experts

    def mlp_in_flight(self, tensor_parallel: int) -> int:
        """See `ModelSpec`; also tokens and their gradients in the order of ranks and of experts, there and back."""
        copies = 6 * self.experts_per_token * self.hidden_size
        return 4 * self.mlp_numbers(tensor_parallel) // 3 + copies // tensor_parallel

    def _backbone(self, tensor_parallel: int) -> int:
        dense = 3 * self.hidden_size * self.ffn_hidden_size // tensor_parallel
        router = self.hidden_size * self.num_experts
        # An expert is whole on every rank.
        layers = self._expert_layers * (router - dense)
        return super()._backbone(tensor_parallel) + layers + self.expert_parameters

    @property
    def _expert(self) -> int:
        return 3 * self.hidden_size * self.expert_ffn_size

    @property
    def _expert_layers(self) -> int:
        return self.num_layers - len(self.dense_layers)


def indivisible_sizes(shape: Mapping[str, Any], tensor_parallel: int, *, resized: bool = False) -> list[Problem]:
    """What of a model's sizes, by the names of `ModelSpec`, does not divide by the tensor-parallel size.

    Args:
        resized: a checkpoint of another tensor-parallel size is read, where the padding of the vocabulary differs.
    """
    names = {"attention heads": "num_heads", "key-value heads": "num_kv_heads", "FFN size": "ffn_hidden_size"}
    names |= {"vocabulary": "vocab_size"} if resized else {}
    # A checkpoint's record of them may be damaged.
    sizes = {what: shape.get(name) for what, name in names.items()}
    return [
        INDIVISIBLE(
            f"the model's {what} ({size}) must be a multiple of --tensor-model-parallel-size",
            fix="choose a --tensor-model-parallel-size that divides it",
            got=str(tensor_parallel),
            expected=f"a divisor of {size}",
        )
        for what, size in sizes.items()
        if isinstance(size, int) and size % tensor_parallel
    ]


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder as it stands; the only reader of that file.
    Raises ConfigError: it is not a readable JSON object."""
    return read_json(folder / CONFIG_FILE)


def known_folder(hf_checkpoint: str) -> Path | None:
    """A folder with nothing but the `config.json` of a model that bundled recipes name; None for other models.

    By the last part of the path (`quickstart/model`: the last two), so that plan and memory of a recipe are known
    where the model is missing.
    """
    path = Path(hf_checkpoint.removeprefix("package:"))
    folder = KNOWN / ("quickstart" if path.parts[-2:] == ("quickstart", "model") else path.name)
    return folder if hf_checkpoint and folder.parent == KNOWN and (folder / CONFIG_FILE).is_file() else None


def config_of(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder; empty where it is missing or unusable, which rules report."""
    try:
        return read_config(folder)
    except ConfigError:
        return {}


def read_spec(folder: Path) -> ModelSpec:
    """What `config.json` in `folder` describes, for the families of our own converter.
    Raises ConfigError: no readable `config.json`, an unknown family, or a feature that is not implemented."""
    path, config = folder / CONFIG_FILE, read_config(folder)
    family = config.get("model_type")
    if family not in FAMILIES:
        raise unsupported(path, "model_type", family, " or ".join(FAMILIES))
    full = completed(path, config)
    layers, kinds = full["num_hidden_layers"], full.get("layer_types")
    if kinds is not None and kinds != ["full_attention"] * layers:
        raise unsupported(path, "layer_types", kinds, f"{layers} times full_attention")
    plain = plain_spec(path, full)
    if family not in MOE_FAMILIES:
        return plain
    step, dense = full["decoder_sparse_step"], full["mlp_only_layers"]
    return MoeSpec(
        **vars(plain),
        num_experts=full["num_experts"],
        experts_per_token=full["num_experts_per_tok"],
        expert_ffn_size=full["moe_intermediate_size"],
        normalized_routing=full["norm_topk_prob"],
        dense_layers=tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step),
    )


def plain_spec(path: Path, full: Mapping[str, Any]) -> ModelSpec:
    """The specification that a completed configuration describes."""
    family = full["model_type"]
    theta, scaling = rotary(path, full)
    return ModelSpec(
        family=family,
        num_layers=full["num_hidden_layers"],
        hidden_size=full["hidden_size"],
        ffn_hidden_size=full["intermediate_size"],
        num_heads=full["num_attention_heads"],
        num_kv_heads=full["num_key_value_heads"],
        head_dim=full["head_dim"],
        vocab_size=full["vocab_size"],
        tied=full["tie_word_embeddings"],
        rope_theta=theta,
        rope_scaling=scaling,
        rms_eps=full["rms_norm_eps"],
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", *MOE_FAMILIES),
        max_positions=full["max_position_embeddings"],
    )


def rotary(path: Path, full: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).
    Raises ConfigError: places disagree, or the scaling is not implemented."""
    stated = [_rotary_in(path, key, full) for key in ("rope_parameters", "rope_scaling") if full.get(key)]
    stated = stated or [(_base(path, full["rope_theta"]), None)]
    if stated[0] != stated[-1]:
        raise unsupported(path, "rope_scaling", full["rope_scaling"], "absent, or the same as rope_parameters")
    return stated[0]


def _rotary_in(path: Path, key: str, full: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    rope, text_only = full[key], full["model_type"] not in BRIDGE_FAMILIES
    if not isinstance(rope, dict):
        raise unsupported(path, key, rope, "a JSON object")
    kind = rope.get("rope_type") or rope.get("type") or ("absent" if rope.get("factor") else "default")
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise unsupported(path, f"{key}.rope_type", kind, "default, linear or llama3")
    require = requirement(path, rope, f"{key}.")
    require(rope.get("type") in (None, kind), "type", f"absent, or the same as rope_type ({kind})")
    for name, value in rope.items():
        require(value is None or name in (_KNOWN if text_only else _KNOWN | _IMAGES), name, "absent")
    require(not text_only or rope.get("partial_rotary_factor") in (None, 1.0), "partial_rotary_factor", "1.0")
    inner, outer = rope.get("rope_theta"), full["rope_theta"]
    require(None in (inner, outer) or inner == outer, "rope_theta", f"the same as rope_theta ({outer})")
    rope = {"original_max_position_embeddings": full["max_position_embeddings"]} | rope
    if kind == "llama3":
        require_counts(path, rope, _NUMBERS[3:])
    numbers = [positive(path, f"{key}.{name}", rope.get(name)) for name in _NEEDED[kind]]
    if kind == "llama3":
        require(numbers[1] < numbers[2], "low_freq_factor", f"below high_freq_factor ({numbers[2]})")
    theta = _base(path, outer if inner is None else inner)
    match numbers:
        case [factor]:
            return theta, RopeScaling(kind, factor)
        case [factor, low, high, positions]:
            return theta, RopeScaling(kind, factor, low, high, int(positions))
    return theta, None


def _base(path: Path, theta: object) -> float:
    return DEFAULT_THETA if theta is None else positive(path, "rope_theta", theta)
