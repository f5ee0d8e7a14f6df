"""Hugging Face weights in, the decoder's fused weights out.

Rotary embeddings become one complex product: rows of the query and key matrices are stored with the two
halves that Hugging Face rotates against each other interleaved, `(x_i, x_{i + D/2})` side by side. Scores do
not change, because queries and keys are permuted alike.

Weights change rarely, so oneDNN packs each of them once, where torch has it: with a few dozen rows a plain product
spends a quarter of its time rearranging the weight, every time. The packed operators are the ones TorchInductor emits;
only this module and `backends.megatron.products` name them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from relax_cli.errors import RunError, problem_kind
from relax_cli.models.headers import EMBEDDING, FINAL_NORM, HEAD, ROTARY_TABLE, ROUTER, expected_shapes, mlps
from relax_cli.models.spec import ModelSpec

ROLLOUT_WEIGHTS = problem_kind(
    "rollout-weights",
    "During a run",
    "Published weights do not fit the rollout engine's model.",
    option="--hf-checkpoint",
)


class Linear:
    """`y = x @ weight.T + bias` for `x` `[N, in]`, and what can be fused into it; from public torch functions."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """`y`."""
        return F.linear(x, self._weight, self._bias)

    def silu(self, x: Tensor) -> Tensor:
        """`silu(y)`."""
        return F.silu(self(x), inplace=True)

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """`y * other`."""
        return self(x).mul_(other)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """`y + other`."""
        return self(x).add_(other)


class PackedLinear(Linear):
    """The same over a copy of the weight in oneDNN's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight), bias)

    def __call__(self, x: Tensor, then: str = "none") -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, then, [], "")
        return out

    def silu(self, x: Tensor) -> Tensor:
        return self(x, "swish")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return self._binary(x, other, "mul")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self._binary(x, other, "add")

    def _binary(self, x: Tensor, other: Tensor, then: str) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, then)
        return out


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest `Linear` this torch offers; whether it copies `weight` or keeps it is open."""
    packs = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return PackedLinear(weight, bias) if packs else Linear(weight, bias)


@dataclass(frozen=True)
class Mlp:
    """SwiGLU of one layer, or of one expert."""

    gate: Linear
    up: Linear
    down: Linear

    def __call__(self, h_NH: Tensor) -> Tensor:
        """`down(silu(gate(h)) * up(h))`."""
        return self.down(self.up.times(h_NH, self.gate.silu(h_NH)))

    def plus(self, h_NH: Tensor, x_NH: Tensor) -> Tensor:
        """The same, added to `x_NH`."""
        return self.down.plus(self.up.times(h_NH, self.gate.silu(h_NH)), x_NH)


@dataclass(frozen=True)
class Layer:
    """One layer, ready to run."""

    input_norm: Tensor
    qkv: Linear
    """`[N, H]` to `[N, K, G + 2, D]` in one dimension: of each key/value head its queries, its key and its value."""
    qk_norm: Tensor | None
    """`[G + 1, D]`: the query weight for each query head, then the key weight."""
    output: Linear
    post_norm: Tensor
    router: Linear | None
    """`[N, H]` to `[N, experts]` in a layer with experts."""
    mlps: list[Mlp]
    """One, or that of each expert."""


@dataclass(frozen=True)
class Weights:
    """A whole model, ready to run."""

    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Linear


def load_weights(spec: ModelSpec, named: Iterable[tuple[str, Tensor]]) -> Weights:
    """Copy every weight of the model; `named` yields HF names and tensors of any floating dtype.
    Raises RunError: a name is unknown, missing or given twice, or a shape is wrong."""
    shapes = expected_shapes(spec)
    hf: dict[str, Tensor] = {}
    for name, weight in named:
        # As in HF: with tied embeddings this is a second name of the embedding.
        if (spec.tied and name == HEAD) or name.endswith(ROTARY_TABLE):
            continue
        if name not in shapes or name in hf:
            trouble = "was given twice" if name in hf else "is not part of this model"
            raise _bad_weights(f"weight {name} {trouble}")
        if tuple(weight.shape) != shapes[name]:
            raise _bad_weights(f"weight {name} has the wrong shape", str(tuple(weight.shape)), str(shapes[name]))
        hf[name] = torch.empty(shapes[name]).copy_(weight)
    if missing := [name for name in shapes if name not in hf]:
        raise _bad_weights(f"{len(missing)} weights are missing, the first is {missing[0]}")
    layers = [_layer(spec, index, hf) for index in range(spec.num_layers)]
    embedding = hf[EMBEDDING]
    return Weights(embedding, layers, hf[FINAL_NORM], linear(hf.get(HEAD, embedding)))


def _layer(spec: ModelSpec, index: int, hf: dict[str, Tensor]) -> Layer:
    """Takes the tensors of the layer out of `hf`: they are freed as soon as they are packed."""

    def take(name: str) -> Tensor:
        return hf.pop(f"model.layers.{index}.{name}")

    def qkv(kind: str) -> Tensor:
        q, k, v = (
            x.view(spec.num_kv_heads, -1, spec.head_dim, *x.shape[1:])
            for x in (take(f"self_attn.{part}_proj.{kind}") for part in "qkv")
        )
        return torch.cat((_interleaved(q, 2), _interleaved(k, 2), v), 1).flatten(0, 2)

    qk_norm = None
    if spec.qk_norm:
        q, k = (_interleaved(take(f"self_attn.{part}_norm.weight"), 0) for part in "qk")
        qk_norm = torch.stack((*[q] * (spec.num_heads // spec.num_kv_heads), k))
    experts = spec.experts_in(index)
    return Layer(
        input_norm=take("input_layernorm.weight"),
        qkv=linear(qkv("weight"), qkv("bias") if spec.qkv_bias else None),
        qk_norm=qk_norm,
        output=linear(take("self_attn.o_proj.weight")),
        post_norm=take("post_attention_layernorm.weight"),
        router=linear(take(ROUTER)) if experts else None,
        mlps=[
            Mlp(*(linear(take(f"{mlp}{part}_proj.weight")) for part in ("gate", "up", "down"))) for mlp in mlps(experts)
        ],
    )


def _interleaved(weight: Tensor, dim: int) -> Tensor:
    """The two halves of a dimension, element by element."""
    return torch.unflatten(weight, dim, (2, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def _bad_weights(message: str, got: str = "", expected: str = "") -> RunError:
    fix = "use a model folder whose config.json belongs to its weights"
    return RunError(ROLLOUT_WEIGHTS(message, fix=fix, got=got, expected=expected))
