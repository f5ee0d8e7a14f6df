"""From a loss per token to the scalar to differentiate. Legend: `B` samples, `T` response tokens (padded)."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from relax_cli.algorithms.masking import as_bool, select

Mode: TypeAlias = Literal["sample", "token"]
"""Sum over samples of their token means, or sum over tokens."""


def aggregate(loss_per_token: Tensor, mask: Tensor, *, mode: Mode, denominator: float | Tensor) -> Tensor:
    """One micro-batch's share of the global loss; the shares of all micro-batches and ranks add up to it.

    `sample` sums over rows the mean over a row's trainable tokens; `token` sums over trainable tokens.
    Dividing by a number of the *global* batch is what makes loss and gradient independent of how the batch
    was cut up.

    Args:
        loss_per_token: `[B, T]`, as the mask, which is bool or numeric.
        denominator: of the whole global batch, all ranks together: samples (`sample`); trainable tokens, or samples
            times a constant length (`token`).

    Returns a scalar of the loss's dtype (at least float32); 0 with gradient 0 where nothing is trainable.
    """
    assert mode in ("sample", "token"), mode
    mask_BT = as_bool(mask)
    loss_BT = select(loss_per_token, mask_BT)
    # Positive and negative terms cancel: float64 sums keep the result independent of their order.
    sum_B = loss_BT.sum(dim=1, dtype=torch.float64)
    if mode == "sample":
        sum_B = sum_B / mask_BT.sum(dim=1).clamp(min=1)
    return (sum_B.sum() / denominator).to(loss_BT.dtype)
