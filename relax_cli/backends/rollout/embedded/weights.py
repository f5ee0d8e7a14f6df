"""Hugging Face weights in, the decoder's fused weights out.

Rotary embeddings become one complex product: rows of the query and key matrices are stored with the two
halves that Hugging Face rotates against each other interleaved, `(x_i, x_{i + D/2})` side by side. Scores do
not change, because queries and keys are permuted alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from relax_cli.backends.rollout.embedded.linear import Linear, linear
from relax_cli.errors import RunError, problem_kind
from relax_cli.models.headers import ROUTER, mlps
from relax_cli.models.spec import ModelSpec

ROLLOUT_WEIGHTS = problem_kind(
    "rollout-weights",
    "During a run",
    "Published weights do not fit the rollout engine's model.",
    option="--hf-checkpoint",
)


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
    model = _Buffers(spec)
    missing = dict.fromkeys(model.slots)
    for name, weight in named:
        if spec.tied and name == "lm_head.weight":
            # As in HF: with tied embeddings this is a second name of the embedding.
            continue
        if name not in missing:
            trouble = "was given twice" if name in model.slots else "is not part of this model"
            raise _bad_weights(f"weight {name} {trouble}")
        slot = model.slots[name]
        if tuple(weight.shape) != slot.shape:
            raise _bad_weights(f"weight {name} has the wrong shape", str(tuple(weight.shape)), str(slot.shape))
        slot.target.copy_(weight.reshape(slot.arranged))
        del missing[name]
    if missing:
        raise _bad_weights(f"{len(missing)} weights are missing, the first is {next(iter(missing))}")
    return model.finish()


@dataclass(frozen=True)
class _Slot:
    """Where the weight of one HF name goes."""

    shape: tuple[int, ...]
    """The shape it must have."""
    arranged: tuple[int, ...]
    """The shape to view it in, so that it can be copied into `target`."""
    target: Tensor


class _Buffers:
    """Empty float32 tensors of the fused shapes, and for every HF name the view that takes it."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.slots: dict[str, _Slot] = {}
        self._embedding = self._plain("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self._head = self._embedding
        if not spec.tied:
            self._head = self._plain("lm_head.weight", spec.vocab_size, spec.hidden_size)
        self._norm = self._plain("model.norm.weight", spec.hidden_size)
        self._layers = [self._layer(f"model.layers.{index}.", index) for index in range(spec.num_layers)]

    def finish(self) -> Weights:
        """Pack everything; each plain layer is freed as soon as it is packed."""
        self.slots.clear()
        self._layers.reverse()
        layers = [_pack(self._layers.pop()) for _ in range(self.spec.num_layers)]
        return Weights(self._embedding, layers, self._norm, linear(self._head))

    def _layer(self, prefix: str, index: int) -> dict[str, Tensor]:
        c = self.spec
        tensors = {
            "input_norm": self._plain(prefix + "input_layernorm.weight", c.hidden_size),
            "post_norm": self._plain(prefix + "post_attention_layernorm.weight", c.hidden_size),
        }
        attention = prefix + "self_attn."
        tensors["qkv.weight"] = self._qkv(attention, "weight", c.hidden_size)
        if c.qkv_bias:
            tensors["qkv.bias"] = self._qkv(attention, "bias")
        tensors["output.weight"] = self._plain(attention + "o_proj.weight", c.hidden_size, c.num_heads * c.head_dim)
        experts, width = c.experts_in(index), c.ffn_size_in(index)
        if experts:
            tensors["router"] = self._plain(prefix + ROUTER, experts, c.hidden_size)
        for number, mlp in enumerate(mlps(experts)):
            shapes = {"gate": (width, c.hidden_size), "up": (width, c.hidden_size), "down": (c.hidden_size, width)}
            for name, shape in shapes.items():
                tensors[f"{number}.{name}.weight"] = self._plain(f"{prefix}{mlp}{name}_proj.weight", *shape)
        if c.qk_norm:
            tensors["qk_norm"] = self._qk_norm(attention)
        return tensors

    def _plain(self, name: str, *shape: int) -> Tensor:
        target = torch.empty(shape)
        self.slots[name] = _Slot(shape, shape, target)
        return target

    def _qkv(self, prefix: str, kind: str, *inputs: int) -> Tensor:
        c = self.spec
        heads = (c.num_heads // c.num_kv_heads, 1, 1)
        fused = torch.empty(c.num_kv_heads, sum(heads), c.head_dim, *inputs)
        for name, target in zip("qkv", fused.split_with_sizes(heads, dim=1), strict=True):
            shape = (target.shape[0] * target.shape[1] * c.head_dim, *inputs)
            if name != "v":
                target = torch.unflatten(target, 2, (-1, 2)).transpose(2, 3)
            self.slots[f"{prefix}{name}_proj.{kind}"] = _Slot(shape, tuple(target.shape), target)
        return fused.flatten(0, 2)

    def _qk_norm(self, prefix: str) -> Tensor:
        c = self.spec
        heads = (c.num_heads // c.num_kv_heads, 1)
        fused = torch.empty(sum(heads), c.head_dim)
        for name, target in zip("qk", fused.split_with_sizes(heads), strict=True):
            # One weight of [D] is copied to every head.
            target = torch.unflatten(target, 1, (-1, 2)).transpose(1, 2)
            self.slots[f"{prefix}{name}_norm.weight"] = _Slot((c.head_dim,), (2, c.head_dim // 2), target)
        return fused


def _pack(tensors: dict[str, Tensor]) -> Layer:
    def packed(name: str) -> Linear:
        return linear(tensors[name + ".weight"], tensors.get(name + ".bias"))

    count = sum(name.endswith("gate.weight") for name in tensors)
    return Layer(
        input_norm=tensors["input_norm"],
        qkv=packed("qkv"),
        qk_norm=tensors.get("qk_norm"),
        output=packed("output"),
        post_norm=tensors["post_norm"],
        router=linear(tensors["router"]) if "router" in tensors else None,
        mlps=[Mlp(*(packed(f"{number}.{name}") for name in ("gate", "up", "down"))) for number in range(count)],
    )


def _bad_weights(message: str, got: str = "", expected: str = "") -> RunError:
    return RunError(
        ROLLOUT_WEIGHTS(
            message, fix="use a model folder whose config.json belongs to its weights", got=got, expected=expected
        )
    )
