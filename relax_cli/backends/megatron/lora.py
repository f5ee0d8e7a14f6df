"""Low-rank adapters in Megatron's linear layers (LoRA, arXiv:2106.09685).

A layer computes with the merged weight `W + α/r · B·A`, rounded as the published weight is: rollout engine, export and
trainer then compute with the same numbers, where a path of its own beside `W` would differ by that rounding. The
gradients of `A` and `B` are the low-rank ones; the gradient of a whole matrix is never made.
Legend: `r` rank, `N` tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import Module, Parameter

from relax_cli.backends.megatron import parallel
from relax_cli.models.convert import merged
from relax_cli.models.lora import Lora

A, B = "lora_a", "lora_b"


class _Adapted(Module):
    """What both kinds of layers share; the attributes above `__init__` are set by `adapted`."""

    lora: ClassVar[Lora]
    is_gate_up: ClassVar[bool]
    split: ClassVar[int]
    """Dimension of the weight that is split over tensor-parallel ranks."""
    weight: Parameter
    bias: Parameter | None
    sequence_parallel: bool
    skip_bias_add: bool
    tp_group: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rows, columns = self.weight.shape
        self.lora_a = Parameter(self.weight.new_empty(self.lora.rank, columns))
        self.lora_b = Parameter(self.weight.new_zeros(rows, self.lora.rank))
        split, whole = (self.lora_b, self.lora_a) if self.split == 0 else (self.lora_a, self.lora_b)
        set_tensor_model_parallel_attributes(split, True, self.split, 1)
        # A rank sees the part of its gradient that comes from its own slice of the matrix; see `replicated`.
        whole.partly_used = True  # type: ignore[attr-defined]

    def merged_weight(self) -> Tensor:
        """This rank's part of the weight that the layer computes with."""
        with torch.no_grad():
            return merged(self.weight, self.lora_a, self.lora_b, self.lora.scale)

    def product(self, x: Tensor) -> Tensor:
        """`x` times the merged weight of this rank."""
        return _LowRank.apply(x, self.weight, self.lora_a, self.lora_b, self.lora.scale)  # type: ignore[no-any-return,no-untyped-call]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's, with the adapters."""
        assert metadata is not None, "every caller passes the groups"
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": self.split, "bias": 0, (B, A)[self.split]: self.split},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.is_gate_up:
            state[prefix + B] = apply_swiglu_sharded_factory(state[prefix + B], sharded_offsets)
        return state


class _Columns(_Adapted, ColumnParallelLinear):  # type: ignore[misc]
    split = 0

    def forward(
        self, input_: Tensor, weight: None = None, runtime_gather_output: None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `ColumnParallelLinear`."""
        is_shared = self.sequence_parallel
        gather = gather_from_sequence_parallel_region if is_shared else copy_to_tensor_model_parallel_region
        out = self.product(gather(input_, group=self.tp_group))
        if self.skip_bias_add or self.bias is None:
            return out, self.bias
        return out + self.bias, None


class _Rows(_Adapted, RowParallelLinear):  # type: ignore[misc]
    split = 1

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """See `RowParallelLinear`; the matrices of our models have no bias here."""
        assert self.bias is None
        is_shared = self.sequence_parallel
        reduce = reduce_scatter_to_sequence_parallel_region if is_shared else reduce_from_tensor_model_parallel_region
        return reduce(self.product(input_), group=self.tp_group), None


class _LowRank(torch.autograd.Function):
    """`x · merged(W, A, B)ᵀ`. The merged weight is made again for the backward pass, so that none is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return F.linear(x, merged(weight, a, b, scale))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor, Tensor, None]:
        x, weight, a, b = ctx.saved_tensors
        grad_x = grad @ merged(weight, a, b, ctx.scale) if ctx.needs_input_grad[0] else None
        x_N, grad_N = x.flatten(0, -2), grad.flatten(0, -2)
        grad_a = (grad_N @ b).mul_(ctx.scale).T @ x_N
        grad_b = grad_N.T @ (x_N @ a.T).mul_(ctx.scale)
        return grad_x, None, grad_a, grad_b, None


def adapted(target: str, lora: Lora) -> type[Module]:
    """The class for a layer spec of the layer `target` with adapters."""
    base = _Columns if target in ("linear_qkv", "linear_fc1") else _Rows
    return type(base.__name__, (base,), {"lora": lora, "is_gate_up": target == "linear_fc1"})


def freeze_all_but_adapters(model: Module, seed: int, global_name: Callable[[str], str]) -> None:
    """Leave the adapters as the only parameters that are trained, and initialise `A`; `B` is 0. `A` is uniform as the
    weight of a linear layer is, and by the `global_name` of the layer the same at every parallel layout."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    for name, layer in model.named_modules():
        if isinstance(layer, _Adapted):
            generator = torch.Generator().manual_seed(seed ^ zlib.crc32(global_name(name).encode()))
            ranks = parallel.TENSOR.size if layer.split == 1 else 1
            inputs = layer.lora_a.size(1) * ranks
            a = torch.empty(layer.lora.rank, inputs).uniform_(-1, 1, generator=generator) / inputs**0.5
            with torch.no_grad():
                layer.lora_a.copy_(a.chunk(ranks, 1)[parallel.TENSOR.rank % ranks])


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name is an `A` or a `B`."""
    return name.endswith((f".{A}", f".{B}"))


def adapted_layers(model: Module) -> dict[str, _Adapted]:
    """The layers with adapters, by the name of their weight."""
    return {f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, _Adapted)}
