"""Selecting trainable slots, so that what lies in masked ones never reaches a value or a gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bool(mask: Tensor) -> Tensor:
    """The mask as bool, same shape; in a numeric mask every nonzero slot is trainable."""
    return mask if mask.dtype == torch.bool else mask != 0


def select(x: Tensor, mask: Tensor) -> Tensor:
    """`x` in at least float32, with 0 wherever the bool `mask` of the same shape is False.

    Apply it to the inputs of a formula: multiplying a result by the mask would keep NaN (NaN * 0 is NaN), also
    in the gradient. float64 stays float64, so that a formula can be checked against finite differences.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.where(mask, wide, torch.zeros((), dtype=wide.dtype, device=wide.device))
