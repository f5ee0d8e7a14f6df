"""Hugging Face names and layouts to Megatron's (local layer spec) and back; both ways are exact copies.

Megatron fuses `q_proj, k_proj, v_proj` into one matrix ordered by key-value group (the group's queries, its key, its
value) and `gate_proj, up_proj` into one (gate first). Under tensor parallelism a rank has whole
groups, and its own slice of gate followed by its own slice of up. A vocabulary that does not divide gets rows of zeros
at its end. Experts are numbered over all ranks.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from relax_cli.errors import ConfigError
from relax_cli.models import headers
from relax_cli.models.headers import HEAD, ROUTER, shape_problems, tied_mismatch
from relax_cli.models.hf import HfWeights
from relax_cli.models.spec import ModelSpec, indivisible_sizes

EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
OUTPUT = "output_layer.weight"
LAYERS = "decoder.layers."
EXPERTS = "experts.local_experts."
_FC1, _FC2 = "linear_fc1.weight", "linear_fc2.weight"

_OUTSIDE_LAYERS = {EMBEDDING: headers.EMBEDDING, FINAL_NORM: headers.FINAL_NORM, OUTPUT: HEAD}
_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": ROUTER,
}
"""Parameters of a layer that are the same tensor on both sides."""


def hf_to_megatron(weights: Mapping[str, Tensor], spec: ModelSpec, tp_size: int, tp_rank: int) -> dict[str, Tensor]:
    """The state of one tensor-parallel rank, by Megatron's parameter names; `rank_tensors` gives it piece by piece."""
    return dict(rank_tensors(weights, spec, tp_size, tp_rank))


def rank_tensors(
    weights: Mapping[str, Tensor], spec: ModelSpec, tp_size: int, tp_rank: int, only: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of one tensor-parallel rank, read on request: a whole model may not fit the memory.

    Args:
        weights: all tensors of the model under their Hugging Face names.
        only: parameters of layers that are wanted; all when None.

    Raises:
        ConfigError: a tensor is missing, unknown or of a wrong shape, or the model does not divide by `tp_size`.
    """
    if problems := indivisible_sizes(vars(spec), tp_size):
        raise ConfigError(problems)
    shapes = weights.shapes if isinstance(weights, HfWeights) else {n: tuple(t.shape) for n, t in weights.items()}
    if problems := shape_problems(shapes, spec):
        raise ConfigError(problems)
    filler = padded_vocab(spec, tp_size) - spec.vocab_size
    for name in megatron_names(spec):
        if name.startswith(LAYERS) and only is not None and name not in only:
            continue
        full = _fused([weights[hf] for hf in _hf_names(name)], spec)
        is_twice = name == EMBEDDING and spec.tied and HEAD in weights and not full.is_meta
        if is_twice and not torch.equal(full, weights[HEAD]):
            raise ConfigError(tied_mismatch())
        if name in (EMBEDDING, OUTPUT) and filler:
            full = F.pad(full, (0, 0, 0, filler))
        yield name, shard_for_rank(name, full, tp_size, tp_rank)


def megatron_to_hf(full_state: Mapping[str, Tensor], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and tensors of an unsharded Megatron state (see `merge_shards`)."""
    for name in megatron_names(spec):
        yield from hf_tensors(name, full_state[name], spec)


def megatron_names(spec: ModelSpec) -> list[str]:
    """Every parameter of a policy, in the order in which Hugging Face writes what is made of it."""
    names = [EMBEDDING]
    norms = [f"self_attention.{part}_layernorm.weight" for part in ("q", "k")] if spec.qk_norm else []
    for layer in range(spec.num_layers):
        experts = spec.experts_in(layer)
        mlps = [f"mlp.{EXPERTS}{index}." for index in range(experts)] or ["mlp."]
        parts = [
            "input_layernorm.weight",
            *(f"self_attention.linear_qkv.{kind}" for kind in (("weight", "bias") if spec.qkv_bias else ("weight",))),
            *norms,
            "self_attention.linear_proj.weight",
            "pre_mlp_layernorm.weight",
            *(["mlp.router.weight"] if experts else []),
            *(mlp + matrix for mlp in mlps for matrix in (_FC1, _FC2)),
        ]
        names += [f"{LAYERS}{layer}.{part}" for part in parts]
    return [*names, FINAL_NORM] if spec.tied else [*names, FINAL_NORM, OUTPUT]


def hf_tensors(name: str, full: Tensor, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors, one or more, that the unsharded Megatron parameter `name` contains.

    They may be views of it. Also works on tensors of the `meta` device.
    """
    names = _hf_names(name)
    match len(names):
        case 1:
            parts = [full[: spec.vocab_size] if name in (EMBEDDING, OUTPUT) else full]
        case 2:
            parts = [half.contiguous() for half in full.chunk(2)]
        case _:
            tail, heads = full.shape[1:], (spec.num_heads // spec.num_kv_heads, 1, 1)
            grouped = full.reshape(spec.num_kv_heads, sum(heads), spec.head_dim, *tail).split_with_sizes(heads, 1)
            parts = [part.reshape(-1, *tail).contiguous() for part in grouped]
    yield from zip(names, parts, strict=True)


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """`weight + scale · b·a`, computed in at least fp32 and rounded once to the type of the weight."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scale).to(weight.dtype)


def shard_for_rank(name: str, full: Tensor, tp_size: int, tp_rank: int) -> Tensor:
    """The part of an unsharded Megatron tensor of one tensor-parallel rank."""
    dim = split_dimension(name)
    if tp_size == 1 or dim is None:
        return full
    return torch.cat([half.chunk(tp_size, dim)[tp_rank] for half in _halves(name, full)], dim)


def merge_shards(name: str, shards: Sequence[Tensor]) -> Tensor:
    """Undo `shard_for_rank`: the unsharded tensor from all ranks' parts, in rank order."""
    dim = split_dimension(name)
    if len(shards) == 1 or dim is None:
        return shards[0]
    halves = zip(*(_halves(name, shard) for shard in shards), strict=True)
    return torch.cat([part for half in halves for part in half], dim)


def padded_vocab(spec: ModelSpec, tp_size: int) -> int:
    """Rows of the embedding over all ranks: the vocabulary, and what makes every rank's slice equally long."""
    return spec.vocab_size + -spec.vocab_size % tp_size


def split_dimension(name: str) -> int | None:
    """The dimension in which tensor-parallel ranks have different parts of a parameter; None: each has all of it."""
    if EXPERTS in name:
        return None
    if name.endswith(("linear_proj.weight", _FC2)):
        return 1
    return 0 if name.endswith(_FC1) or "linear_qkv" in name or name in (EMBEDDING, OUTPUT) else None


def _halves(name: str, tensor: Tensor) -> Sequence[Tensor]:
    """Gate and up, of each of which a rank has its own slice; the whole of other parameters."""
    return tensor.chunk(2) if name.endswith(_FC1) else (tensor,)


def _hf_names(name: str) -> list[str]:
    """The Hugging Face tensors of the Megatron parameter `name`: one, gate and up, or query, key and value."""
    if name in _OUTSIDE_LAYERS:
        return [_OUTSIDE_LAYERS[name]]
    layer, part = name.removeprefix(LAYERS).split(".", 1)
    prefix = f"model.layers.{layer}."
    if part.startswith("self_attention.linear_qkv."):
        return [f"{prefix}self_attn.{x}_proj.{part.rpartition('.')[2]}" for x in "qkv"]
    if part.endswith((_FC1, _FC2)):
        # mlp.experts.local_experts.3.linear_fc1.weight to mlp.experts.3.
        mlp = part.rpartition("linear_fc")[0].replace("local_experts.", "")
        return [f"{prefix}{mlp}{x}_proj.weight" for x in (("gate", "up") if part.endswith(_FC1) else ("down",))]
    return [prefix + _IN_LAYER[part]]


def _fused(parts: Sequence[Tensor], spec: ModelSpec) -> Tensor:
    """The unsharded Megatron parameter that consists of Hugging Face tensors, see `_hf_names`."""
    if len(parts) < 3:
        return torch.cat(list(parts)) if len(parts) == 2 else parts[0]
    tail = parts[0].shape[1:]
    return torch.cat([x.reshape(spec.num_kv_heads, -1, *tail) for x in parts], dim=1).reshape(-1, *tail)
