"""Hugging Face names and layouts to Megatron's (local layer spec) and back; both ways are exact copies.

Megatron fuses `q_proj, k_proj, v_proj` into one matrix ordered by key-value group (the group's queries, its key, its
value) and `gate_proj, up_proj` into one (gate first). Under tensor parallelism a rank holds whole groups, and its
own slice of gate followed by its own slice of up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from relax_cli.checkpoint.hf import ModelSpec
from relax_cli.errors import ConfigError, Problem

EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
OUTPUT = "output_layer.weight"


def hf_to_megatron(weights: Mapping[str, Tensor], spec: ModelSpec, tp_size: int, tp_rank: int) -> dict[str, Tensor]:
    """The state of one tensor-parallel rank, by Megatron's parameter names.

    Args:
        weights: all tensors of the model under their Hugging Face names.

    Raises:
        ConfigError: a tensor is missing, unknown or of a wrong shape, or the model does not divide by `tp_size`.
    """
    check_divisible(spec, tp_size)
    reader = _Reader(weights, spec)
    state = {
        EMBEDDING: reader.take("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size),
        FINAL_NORM: reader.take("model.norm.weight", spec.hidden_size),
    }
    if not spec.tied:
        state[OUTPUT] = reader.take("lm_head.weight", spec.vocab_size, spec.hidden_size)
    for layer in range(spec.num_layers):
        state |= _read_layer(reader, layer)
    reader.refuse_unused()
    return {name: shard_for_rank(name, tensor, tp_size, tp_rank) for name, tensor in state.items()}


def megatron_to_hf(full_state: Mapping[str, Tensor], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and tensors of an unsharded Megatron state (see `merge_shards`)."""
    yield "model.embed_tokens.weight", full_state[EMBEDDING]
    for layer in range(spec.num_layers):
        yield from _write_layer(full_state, spec, layer)
    yield "model.norm.weight", full_state[FINAL_NORM]
    if not spec.tied:
        yield "lm_head.weight", full_state[OUTPUT]


def shard_for_rank(name: str, full: Tensor, tp_size: int, tp_rank: int) -> Tensor:
    """The part of an unsharded Megatron tensor that a tensor-parallel rank holds."""
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


def check_divisible(spec: ModelSpec, tp_size: int) -> None:
    """Raises ConfigError where a dimension does not divide by the tensor-parallel size."""
    parts = {
        "attention heads": spec.num_heads,
        "key-value heads": spec.num_kv_heads,
        "FFN size": spec.ffn_hidden_size,
        "vocabulary": spec.vocab_size,
    }
    problems = [
        Problem(
            id="tensor-parallel-indivisible",
            message=f"the model's {what} ({size}) does not divide by the tensor-parallel size",
            fix="choose a --tensor-model-parallel-size that divides it",
            option="--tensor-model-parallel-size",
            got=str(tp_size),
            expected=f"a divisor of {size}",
        )
        for what, size in parts.items()
        if size % tp_size
    ]
    if problems:
        raise ConfigError(problems)


def _partition_of(name: str) -> str:
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return "columns"
    if name.endswith("linear_fc1.weight"):
        return "gate_up"
    if "linear_qkv" in name or name in (EMBEDDING, OUTPUT):
        return "rows"
    return "none"


class _Reader:
    """Takes tensors by name, checks shapes, and remembers what was taken."""

    def __init__(self, weights: Mapping[str, Tensor], spec: ModelSpec) -> None:
        self.weights = weights
        self.spec = spec
        self.taken: set[str] = set()

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self.weights:
            raise _bad_weights(f"the model has no tensor {name}", expected=name)
        tensor = self.weights[name]
        if tensor.shape != shape:
            message = f"tensor {name} does not have the shape that config.json describes"
            raise _bad_weights(message, str(tuple(tensor.shape)), str(shape))
        self.taken.add(name)
        return tensor

    def refuse_unused(self) -> None:
        # Old exports carry rotary tables, and a copy of the embedding as the tied output layer.
        tied_copy = {"lm_head.weight"} if self.spec.tied else set()
        unused = {name for name in self.weights if not name.endswith("rotary_emb.inv_freq")} - self.taken - tied_copy
        if unused:
            raise _bad_weights(
                f"the model has tensors that config.json does not describe: {', '.join(sorted(unused)[:5])}"
            )


def _bad_weights(message: str, got: str = "", expected: str = "") -> ConfigError:
    return ConfigError(
        Problem(
            id="model-weights-mismatch",
            message=message,
            fix="check that config.json and the safetensors files belong together",
            option="--hf-checkpoint",
            got=got,
            expected=expected,
        )
    )


def _read_layer(reader: _Reader, layer: int) -> dict[str, Tensor]:
    spec, hf, ours = reader.spec, f"model.layers.{layer}", f"decoder.layers.{layer}"
    hidden, ffn, q_rows = spec.hidden_size, spec.ffn_hidden_size, spec.num_heads * spec.head_dim
    state = {
        f"{ours}.input_layernorm.weight": reader.take(f"{hf}.input_layernorm.weight", hidden),
        f"{ours}.self_attention.linear_qkv.weight": _read_qkv(reader, hf, "weight", hidden),
        f"{ours}.self_attention.linear_proj.weight": reader.take(f"{hf}.self_attn.o_proj.weight", hidden, q_rows),
        f"{ours}.pre_mlp_layernorm.weight": reader.take(f"{hf}.post_attention_layernorm.weight", hidden),
        f"{ours}.mlp.linear_fc1.weight": torch.cat(
            [reader.take(f"{hf}.mlp.{part}_proj.weight", ffn, hidden) for part in ("gate", "up")]
        ),
        f"{ours}.mlp.linear_fc2.weight": reader.take(f"{hf}.mlp.down_proj.weight", hidden, ffn),
    }
    if spec.qkv_bias:
        state[f"{ours}.self_attention.linear_qkv.bias"] = _read_qkv(reader, hf, "bias")
    if spec.qk_norm:
        for part in ("q", "k"):
            norm = reader.take(f"{hf}.self_attn.{part}_norm.weight", spec.head_dim)
            state[f"{ours}.self_attention.{part}_layernorm.weight"] = norm
    return state


def _read_qkv(reader: _Reader, hf: str, kind: str, *tail: int) -> Tensor:
    spec = reader.spec
    groups, dim = spec.num_kv_heads, spec.head_dim
    rows = {"q": spec.num_heads * dim, "k": groups * dim, "v": groups * dim}
    parts = [reader.take(f"{hf}.self_attn.{part}_proj.{kind}", count, *tail) for part, count in rows.items()]
    return torch.cat([part.reshape(groups, -1, *tail) for part in parts], dim=1).reshape(-1, *tail)


def _write_layer(state: Mapping[str, Tensor], spec: ModelSpec, layer: int) -> Iterator[tuple[str, Tensor]]:
    hf, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
    yield f"{hf}.input_layernorm.weight", state[f"{ours}.input_layernorm.weight"]
    for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
        yield from _write_qkv(state[f"{ours}.self_attention.linear_qkv.{kind}"], spec, hf, kind)
    if spec.qk_norm:
        for part in ("q", "k"):
            yield (
                f"{hf}.self_attn.{part}_norm.weight",
                state[f"{ours}.self_attention.{part}_layernorm.weight"],
            )
    yield f"{hf}.self_attn.o_proj.weight", state[f"{ours}.self_attention.linear_proj.weight"]
    yield f"{hf}.post_attention_layernorm.weight", state[f"{ours}.pre_mlp_layernorm.weight"]
    gate, up = state[f"{ours}.mlp.linear_fc1.weight"].chunk(2)
    yield f"{hf}.mlp.gate_proj.weight", gate.contiguous()
    yield f"{hf}.mlp.up_proj.weight", up.contiguous()
    yield f"{hf}.mlp.down_proj.weight", state[f"{ours}.mlp.linear_fc2.weight"]


def _write_qkv(fused: Tensor, spec: ModelSpec, hf: str, kind: str) -> Iterator[tuple[str, Tensor]]:
    tail = fused.shape[1:]
    queries = spec.num_heads // spec.num_kv_heads
    grouped = fused.reshape(spec.num_kv_heads, queries + 2, spec.head_dim, *tail)
    for part, heads in (
        ("q", slice(0, queries)),
        ("k", slice(queries, queries + 1)),
        ("v", slice(queries + 1, None)),
    ):
        yield f"{hf}.self_attn.{part}_proj.{kind}", grouped[:, heads].reshape(-1, *tail).contiguous()
