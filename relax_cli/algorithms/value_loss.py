"""The critic's loss, per token. Legend: `B` samples, `T` response tokens (padded)."""

from __future__ import annotations

import torch
from torch import Tensor

from relax_cli.algorithms.masking import as_bool, select
from relax_cli.algorithms.types import LossTerms


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip: float, mask: Tensor | None = None
) -> LossTerms:
    """`max((clip(v, v_old − c, v_old + c) − R)², (v − R)²)`, without a factor ½ and not reduced.

    All tensors are `[B, T]`: the critic's new values, with gradient, its values when the returns were computed, the
    returns, and a mask that is bool or numeric (None: every token is trainable). `value_clip` is `c`. Metric
    `value_clip_frac` is 1 where `|v − v_old| > c`.
    """
    mask_BT = torch.ones_like(values, dtype=torch.bool) if mask is None else as_bool(mask)
    values_BT = select(values, mask_BT)
    old_BT = select(old_values.detach(), mask_BT)
    returns_BT = select(returns.detach(), mask_BT)
    clipped_BT = values_BT.clamp(old_BT - value_clip, old_BT + value_clip)
    loss_BT = torch.maximum((clipped_BT - returns_BT).square(), (values_BT - returns_BT).square())
    moved_BT = (values_BT - old_BT).abs() > value_clip
    return LossTerms(loss_BT, {"value_clip_frac": moved_BT.to(values_BT.dtype)})
