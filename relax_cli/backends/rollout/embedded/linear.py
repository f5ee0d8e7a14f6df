"""Matrix products with weights that change rarely: packed once by oneDNN where torch has it, plain otherwise.

With a few dozen rows a plain product spends a quarter of its time rearranging the weight, every time.
The packed operators are the ones TorchInductor emits; only this module and `backends.megatron.products` name them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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

    def __call__(self, x: Tensor) -> Tensor:
        return self._pointwise(x, "none")

    def silu(self, x: Tensor) -> Tensor:
        return self._pointwise(x, "swish")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return self._binary(x, other, "mul")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self._binary(x, other, "add")

    def _pointwise(self, x: Tensor, then: str) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, then, [], "")
        return out

    def _binary(self, x: Tensor, other: Tensor, then: str) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, then)
        return out


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest `Linear` this torch offers; whether it copies `weight` or keeps it is open."""
    packs = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return PackedLinear(weight, bias) if packs else Linear(weight, bias)
