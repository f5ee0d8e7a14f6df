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
from relax_cli.models.headers import HEAD, ROUTER, shape_problems, tied_mismatch
from relax_cli.models.hf import HfWeights
from relax_cli.models.spec import ModelSpec, indivisible_sizes

EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
OUTPUT = "output_layer.weight"
LAYERS = "decoder.layers."
EXPERTS = "experts.local_experts."
_FC1, _FC2 = "linear_fc1.weight", "linear_fc2.weight"

_OUTSIDE_LAYERS = {EMBEDDING: "model.embed_tokens.weight", FINAL_NORM: "model.norm.weight", OUTPUT: "lm_head.weight"}
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
    for name in (EMBEDDING,) if spec.tied else (EMBEDDING, OUTPUT):
        matrix = weights[_OUTSIDE_LAYERS[name]]
        if spec.tied and HEAD in weights and not _equal(matrix, weights[HEAD]):
            raise ConfigError(tied_mismatch())
        filler = padded_vocab(spec, tp_size) - spec.vocab_size
        yield name, shard_for_rank(name, F.pad(matrix, (0, 0, 0, filler)) if filler else matrix, tp_size, tp_rank)
    yield FINAL_NORM, weights[_OUTSIDE_LAYERS[FINAL_NORM]]
    for layer in range(spec.num_layers):
        for part in _layer_parts(spec, layer):
            name = f"{LAYERS}{layer}.{part}"
            if only is not None and name not in only:
                continue
            tensor = _read_part(weights, spec, f"model.layers.{layer}", part)
            yield name, shard_for_rank(name, tensor, tp_size, tp_rank)


def _equal(one: Tensor, two: Tensor) -> bool:
    return one.is_meta or torch.equal(one, two)


def megatron_to_hf(full_state: Mapping[str, Tensor], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and tensors of an unsharded Megatron state (see `merge_shards`)."""
    for name in megatron_names(spec):
        yield from hf_tensors(name, full_state[name], spec)


def megatron_names(spec: ModelSpec) -> list[str]:
    """Every parameter of a policy, in the order in which Hugging Face writes what is made of it."""
    names = [EMBEDDING, *(f"{LAYERS}{i}.{part}" for i in range(spec.num_layers) for part in _layer_parts(spec, i))]
    return [*names, FINAL_NORM] if spec.tied else [*names, FINAL_NORM, OUTPUT]


def hf_tensors(name: str, full: Tensor, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors, one or more, that the unsharded Megatron parameter `name` contains.

    They may be views of it. Also works on tensors of the `meta` device.
    """
    if name in _OUTSIDE_LAYERS:
        yield _OUTSIDE_LAYERS[name], full if name == FINAL_NORM else full[: spec.vocab_size]
        return
    layer, part = name.removeprefix(LAYERS).split(".", 1)
    hf = f"model.layers.{layer}"
    if part.startswith("self_attention.linear_qkv."):
        yield from _write_qkv(full, spec, hf, part.rpartition(".")[2])
    elif part.endswith(_FC1):
        gate, up = full.chunk(2)
        yield f"{hf}.{_hf_mlp(part)}gate_proj.weight", gate.contiguous()
        yield f"{hf}.{_hf_mlp(part)}up_proj.weight", up.contiguous()
    elif part.endswith(_FC2):
        yield f"{hf}.{_hf_mlp(part)}down_proj.weight", full
    else:
        yield f"{hf}.{_IN_LAYER[part]}", full


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """`weight + scale · b·a`, computed in at least fp32 and rounded once to the type of the weight."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scale).to(weight.dtype)


def shard_for_rank(name: str, full: Tensor, tp_size: int, tp_rank: int) -> Tensor:
    """The part of an unsharded Megatron tensor of one tensor-parallel rank."""
    if tp_size == 1:
        return full
    match _partition_of(name):
        case "none":
            return full
        case "columns":
            return full.chunk(tp_size, 1)[tp_rank].contiguous()
        case "gate_up":
            return torch.cat([half.chunk(tp_size)[tp_rank] for half in full.chunk(2)])
        case _:
            return full.chunk(tp_size)[tp_rank].contiguous()


def merge_shards(name: str, shards: Sequence[Tensor]) -> Tensor:
    """Undo `shard_for_rank`: the unsharded tensor from all ranks' parts, in rank order."""
    if len(shards) == 1:
        return shards[0]
    match _partition_of(name):
        case "none":
            return shards[0]
        case "columns":
            return torch.cat(list(shards), 1)
        case "gate_up":
            halves = [shard.chunk(2) for shard in shards]
            return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
        case _:
            return torch.cat(list(shards))


def padded_vocab(spec: ModelSpec, tp_size: int) -> int:
    """Rows of the embedding over all ranks: the vocabulary, and what makes every rank's slice equally long."""
    return spec.vocab_size + -spec.vocab_size % tp_size


def is_sharded(name: str) -> bool:
    """Whether tensor-parallel ranks have different parts of a parameter; else each has all of it."""
    return _partition_of(name) != "none"


def _partition_of(name: str) -> str:
    if EXPERTS in name:
        return "none"
    if name.endswith(("linear_proj.weight", _FC2)):
        return "columns"
    if name.endswith(_FC1):
        return "gate_up"
    if "linear_qkv" in name or name in (EMBEDDING, OUTPUT):
        return "rows"
    return "none"


def _read_part(weights: Mapping[str, Tensor], spec: ModelSpec, hf: str, part: str) -> Tensor:
    """The unsharded Megatron parameter `part` of a layer, from its Hugging Face tensors."""
    if part.endswith(_FC1):
        return torch.cat([weights[f"{hf}.{_hf_mlp(part)}{half}_proj.weight"] for half in ("gate", "up")])
    if part.endswith(_FC2):
        return weights[f"{hf}.{_hf_mlp(part)}down_proj.weight"]
    if part.startswith("self_attention.linear_qkv."):
        kind = part.rpartition(".")[2]
        parts = [weights[f"{hf}.self_attn.{name}_proj.{kind}"] for name in "qkv"]
        tail = parts[0].shape[1:]
        return torch.cat([x.reshape(spec.num_kv_heads, -1, *tail) for x in parts], dim=1).reshape(-1, *tail)
    return weights[f"{hf}.{_IN_LAYER[part]}"]


def _hf_mlp(part: str) -> str:
    """`mlp.experts.local_experts.3.linear_fc1.weight` to `mlp.experts.3.`."""
    return part.rpartition("linear_fc")[0].replace("local_experts.", "")


def _layer_parts(spec: ModelSpec, layer: int) -> list[str]:
    experts = spec.experts_in(layer)
    mlps = [f"mlp.{EXPERTS}{index}." for index in range(experts)] or ["mlp."]
    norms = [f"self_attention.{part}_layernorm.weight" for part in ("q", "k")] if spec.qk_norm else []
    return [
        "input_layernorm.weight",
        *(f"self_attention.linear_qkv.{kind}" for kind in (("weight", "bias") if spec.qkv_bias else ("weight",))),
        *norms,
        "self_attention.linear_proj.weight",
        "pre_mlp_layernorm.weight",
        *(["mlp.router.weight"] if experts else []),
        *(mlp + matrix for mlp in mlps for matrix in (_FC1, _FC2)),
    ]


def _write_qkv(fused: Tensor, spec: ModelSpec, hf: str, kind: str) -> Iterator[tuple[str, Tensor]]:
    tail = fused.shape[1:]
    queries = spec.num_heads // spec.num_kv_heads
    grouped = fused.reshape(spec.num_kv_heads, queries + 2, spec.head_dim, *tail)
    for part, heads in (("q", slice(0, queries)), ("k", slice(queries, queries + 1)), ("v", slice(queries + 1, None))):
        yield f"{hf}.self_attn.{part}_proj.{kind}", grouped[:, heads].reshape(-1, *tail).contiguous()
