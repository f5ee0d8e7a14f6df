"""Building blocks that fill Megatron's layer specs: attention with rotary positions, RMSNorm, SwiGLU.

They compute what the Hugging Face models compute, on any device, with fewer passes over memory than the composed
operations: on a CPU these passes, not the matrix products, are what a small model waits for. Where TransformerEngine is
used, its norms, matrix products and attention take their places; positions and activation stay these.
Legend: `S` positions, `B` samples, `H` hidden, `n` heads, `d` head size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from relax_cli.backends.device import Device
from relax_cli.backends.megatron import context, parallel, te_import
from relax_cli.backends.megatron.experts import ExpertRouter, picked_routes
from relax_cli.backends.megatron.lora import adapted
from relax_cli.errors import EnvironmentFault
from relax_cli.models.hf import inverse_frequencies
from relax_cli.models.lora import Lora
from relax_cli.models.spec import ModelSpec

LayerKind = Literal["local", "transformer_engine"]

FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""TransformerEngine's names of norms that it computes together with the matrix product behind, and the local names."""


def layer_kind(wanted: Literal["auto", "local", "transformer_engine"], device: Device) -> LayerKind:
    """Which layers to build on `device`; `auto` takes TransformerEngine on CUDA where it imports.
    Raises EnvironmentFault: it was requested and does not import."""
    if wanted == "local" or device.kind == "cpu":
        return "local"
    trouble = te_import.trouble()
    if trouble is not None and wanted == "transformer_engine":
        raise EnvironmentFault(trouble)
    return "transformer_engine" if trouble is None else "local"


def local_name(name: str) -> str:
    """The name that a parameter of the model has in local layers, whichever layers it is from."""
    for fused, local in FUSED_NORMS.items():
        if name.endswith(f".{fused}"):
            return name.removesuffix(fused) + local
    return name


def block_spec(
    spec: ModelSpec, kind: LayerKind, lora: Lora | None = None, stage: range | None = None
) -> TransformerBlockSubmodules:
    """Megatron's transformer layers of that kind, and the norm after them, with the parts of this module in them: those
    of a pipeline stage, or all; local layers may have adapters."""
    table = RotaryTable(spec)
    kinds = {
        experts: _layer_spec(spec, kind, table, experts, lora)
        for experts in {*map(spec.experts_in, range(spec.num_layers))}
    }
    layers = [kinds[spec.experts_in(index)] for index in range(spec.num_layers)]
    layers[-1] = replace(layers[-1], module=ResponseLayer)
    final_norm: Any = RmsNorm if kind == "local" else gpt_layer_specs.TENorm
    here = layers if stage is None else layers[stage.start : stage.stop]
    return TransformerBlockSubmodules(layer_specs=here, layer_norm=final_norm)


def _layer_spec(spec: ModelSpec, kind: LayerKind, table: RotaryTable, experts: int, lora: Lora | None) -> Any:
    if kind == "local":
        layer = gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=experts or None, qk_layernorm=spec.qk_norm, normalization="RMSNorm"
        )
        inner_attention = None
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RmsNorm
        if spec.qk_norm:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = RmsNorm
    else:
        layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=spec.qk_norm)
        inner_attention = layer.submodules.self_attention.submodules.core_attention
    mlp = _mlp_parts(layer.submodules.mlp)
    if experts:
        mlp.router = ExpertRouter
        mlp = _mlp_parts(mlp.experts)
    mlp.activation_func = SwiGlu
    if lora is not None:
        assert kind == "local", "adapters are in local layers"
        for target in lora.targets:
            part = mlp if target.startswith("linear_fc") else layer.submodules.self_attention.submodules
            setattr(part, target, adapted(target, lora))
    # A class, because every version of megatron-core takes one in a spec, and calls it with its own arguments only.
    attention = type("Attention", (RotaryAttention,), {"rotary": table, "inner_attention": inner_attention})
    layer.submodules.self_attention.submodules.core_attention = attention
    return layer


def _mlp_parts(mlp: Any) -> Any:
    """The parts of an MLP's spec, which megatron-core 0.19 turned from a record into a function with arguments."""
    return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules


class ResponseLayer(TransformerLayer):  # type: ignore[misc]
    """The last layer: after its attention only the states that predict response tokens are kept.

    Their positions travel as `context`, Megatron's argument for cross-attention, which these models do not have.
    Under sequence parallelism every rank picks from all states, and keeps its own share of the picked ones.
    """

    def forward(self, *args: Any, context: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        """Hidden states `[S, B, H]` and N positions in them, flattened, to `[N, 1, H]`; under sequence parallelism with
        t ranks, `[S / t, B, H]` to `[N / t, 1, H]`."""
        hidden_SBH, _ = self._forward_attention(*args, **kwargs)
        if self.config.sequence_parallel:
            # The gradient is whole and the same on every rank, so each takes its share instead of adding them up.
            hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH, tensor_parallel_output_grad=False)
        picked_N1H = hidden_SBH.flatten(0, 1).index_select(0, context).unsqueeze(1)
        if self.config.sequence_parallel:
            picked_N1H = scatter_to_sequence_parallel_region(picked_N1H)
        return self._forward_mlp(picked_N1H, padding_mask=picked_routes(kwargs.get("padding_mask"), context)), None


@dataclass
class PackedSamples(PackedSeqParams):  # type: ignore[misc]
    """Where the samples of one row begin and end, for Megatron, TransformerEngine and the attention here."""

    runs: tuple[tuple[int, int], ...] = ()
    """Length and number of neighbours that are equally long."""
    lengths: tuple[int, ...] = ()
    """Of the samples."""
    positions_S: Tensor | None = None
    """Positions of the tokens in their samples."""
    tables: tuple[Tensor, Tensor] | None = None
    """Of rotary positions; made by the first layer."""

    @classmethod
    def of(cls, lengths: Sequence[int], padding: int, device: torch.device) -> PackedSamples:
        """Samples of the given lengths; `padding` tokens at the end of the row count to the last."""
        lengths = [*lengths[:-1], lengths[-1] + padding]
        lengths_B = torch.tensor(lengths, device=device)
        ends_B = lengths_B.cumsum(0)
        first_S = torch.repeat_interleave(ends_B - lengths_B, lengths_B, output_size=sum(lengths))
        bounds = F.pad(ends_B, (1, 0)).int()
        # Ranks of TransformerEngine exchange keys by lengths with padding. Given without need, they cost time.
        padded = bounds if context.pieces() > 1 else None
        return cls(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            runs=tuple((length, len(list(run))) for length, run in groupby(lengths)),
            lengths=tuple(lengths),
            positions_S=torch.arange(first_S.numel(), device=device) - first_S,
        )


class RotaryTable:
    """Cosines and signed sines of rotary position embedding (arXiv:2104.09864), made once and shared by all layers."""

    def __init__(self, spec: ModelSpec) -> None:
        self._inv_freq = inverse_frequencies(spec)
        self._cos = self._sin = torch.empty(0)

    def __call__(self, x_SBnd: Tensor, packed: PackedSamples | None = None) -> tuple[Tensor, Tensor]:
        """Tables `[S, 1, 1, d]`, or `[S, 1, d]` of packed samples `[S, n, d]`, on the device of `x_SBnd`; in fp32,
        because in bf16 neighbouring positions would look alike."""
        if packed is not None and packed.tables is not None:
            return packed.tables
        length = x_SBnd.size(0) * parallel.CONTEXT.size if packed is None else packed.max_seqlen_q
        if self._cos.size(0) < length or self._cos.device != x_SBnd.device:
            angles = torch.outer(torch.arange(length, dtype=torch.float32), self._inv_freq)[:, None, None, :]
            self._cos = torch.cat([angles.cos(), angles.cos()], -1).to(x_SBnd.device)
            self._sin = torch.cat([-angles.sin(), angles.sin()], -1).to(x_SBnd.device)
        lengths = [length] if packed is None else packed.lengths
        here = context.own_places(lengths, x_SBnd.device) if context.pieces() > 1 else slice(sum(lengths))
        if packed is None:
            return self._cos[here], self._sin[here]
        assert packed.positions_S is not None, "made by `of`"
        positions_S = packed.positions_S[here]
        packed.tables = self._cos[positions_S, 0], self._sin[positions_S, 0]
        return packed.tables


class RotaryAttention(MegatronModule):  # type: ignore[misc]
    """Megatron's `core_attention`: rotary positions 0, 1, … and causal attention within each sample.

    Right padding needs no mask: a causal position never sees what comes after it. Of packed samples, those of one
    length are neighbours and so a batch without padding.
    """

    rotary: RotaryTable
    inner_attention: Any = None
    """Class of another module that computes the attention; torch's own does it when None."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **options: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        options |= {"config": config, "layer_number": layer_number, "softmax_scale": softmax_scale}
        self.inner = None if self.inner_attention is None else self.inner_attention(**options)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSamples | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """`[S, B, n, d]` each (fewer heads in key and value) to `[S, B, n·d]`; packed without the B."""
        assert attention_mask is None, "causal only"
        packed = packed_seq_params
        cos, sin = self.rotary(query, packed)
        query, key = _Rotate.apply(query, cos, sin), _Rotate.apply(key, cos, sin)  # type: ignore[no-untyped-call]
        if self.inner is not None:
            return self.inner(query, key, value, attention_mask, packed_seq_params=packed, **kwargs)  # type: ignore[no-any-return]
        ranks = parallel.CONTEXT.size
        if ranks > 1:
            lengths = [query.size(0) * ranks] if packed is None else packed.lengths
            key, value = (context.from_all_ranks(x, lengths) for x in (key, value))
        if packed is None:
            batch = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._causal(*batch).permute(2, 0, 1, 3).flatten(2)
        parts = []
        sizes = [length * count for length, count in packed.runs]
        queries = torch.split(query, [size // ranks for size in sizes])
        for (_, count), *run in zip(packed.runs, queries, *(torch.split(x, sizes) for x in (key, value)), strict=True):
            batch = (x.view(count, -1, *x.shape[1:]).transpose(1, 2) for x in run)
            parts.append(self._causal(*batch).transpose(1, 2).flatten(0, 1))
        return torch.cat(parts).flatten(1)

    def _causal(self, q_BnSd: Tensor, k_BnSd: Tensor, v_BnSd: Tensor) -> Tensor:
        options: dict[str, Any] = {"scale": self.softmax_scale, "enable_gqa": q_BnSd.size(1) != k_BnSd.size(1)}
        if context.pieces() > 1:
            return context.attention(q_BnSd, k_BnSd, v_BnSd, **options)
        return F.scaled_dot_product_attention(q_BnSd, k_BnSd, v_BnSd, is_causal=True, **options)


class _Rotate(torch.autograd.Function):
    """`x·cos + rotate_half(x)·sin` in fp32, in the type of `x`; the gradient is the rotation backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1).to(grad.dtype), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    return (wide * cos).addcmul_(wide.roll(x.size(-1) // 2, -1), sin, value=direction)


class RmsNorm(torch.nn.Module):
    """`weight · x / sqrt(mean(x²) + eps)` over the last dimension (arXiv:1910.07467)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron then adds up the gradients of ranks that have seen other positions.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and type as `x`."""
        if x.is_cpu and x.dtype == torch.float32:
            return _RmsNorm.apply(x, self.weight, self.eps)  # type: ignore[no-any-return,no-untyped-call]
        # CUDA has a fused kernel, and lower precision must be normalised in fp32, which this one does.
        return F.rms_norm(x, list(self.weight.shape), self.weight, self.eps)


class _RmsNorm(torch.autograd.Function):
    """fp32: 3.5 times faster than torch's composition on a CPU, from fewer passes over memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = x.reshape(-1, x.size(-1))
        norm: Tensor = torch.linalg.vector_norm(flat, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        unit = flat * scale
        ctx.save_for_backward(unit, scale, weight)
        return (unit * weight).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, scale, weight = ctx.saved_tensors
        flat = grad.reshape(unit.shape)
        along = flat * unit
        grad_weight = along.sum(0)
        projection = (along @ weight).div_(unit.size(-1)).unsqueeze(-1)
        grad_x = (flat * weight).addcmul_(unit, projection, value=-1).mul_(scale)
        return grad_x.view(grad.shape), grad_weight, None


class SwiGlu(MegatronModule):  # type: ignore[misc]
    """`silu(gate) · up` of a fused `[.., gate | up]` tensor (arXiv:2002.05202)."""

    def forward(self, gate_up: Tensor) -> Tensor:
        """`[.., 2F]` to `[.., F]`."""
        return _SwiGlu.apply(gate_up)  # type: ignore[no-any-return,no-untyped-call]


class _SwiGlu(torch.autograd.Function):
    """Writes both gradients into one buffer instead of concatenating them."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, -1)
        torch.mul(F.silu(gate), grad, out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return out
