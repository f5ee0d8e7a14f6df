"""Generalised advantage estimation over trainable tokens, and whitening.

Paper: Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
arXiv:1506.02438. Legend: `B` samples, `T` response tokens (padded).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from relax_cli.algorithms.gae_scan import gae as gae
from relax_cli.algorithms.masking import as_bool, select


@torch.no_grad()
def plain_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float | Tensor, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition: advantages and returns `[B, T]`, as if the masked tokens did not exist.

    `δ_t = r_t + γ V_{t+1} − V_t`, `A_t = δ_t + γλ A_{t+1}`, `R_t = A_t + V_t`; `V` after the last token is the
    bootstrap value or 0. Runs use `gae`, the same recurrence as a fast scan; a test compares the two.
    """
    advantages_BT = torch.zeros_like(values)
    next_value_B = values.new_zeros(values.shape[0]) if bootstrap is None else bootstrap
    next_advantage_B = torch.zeros_like(next_value_B)
    for t in reversed(range(values.shape[1])):
        delta_B = rewards[:, t] + gamma * next_value_B - values[:, t]
        advantage_B = delta_B + gamma * lam * next_advantage_B
        trainable_B = mask[:, t] != 0
        advantages_BT[:, t] = torch.where(trainable_B, advantage_B, 0.0)
        next_value_B = torch.where(trainable_B, values[:, t], next_value_B)
        next_advantage_B = torch.where(trainable_B, advantage_B, next_advantage_B)
    return advantages_BT, torch.where(mask != 0, advantages_BT + values, 0.0)


@torch.no_grad()
def score_on_last_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """Each sample's scalar reward `[B]` on its last trainable token: `[B, T]`, float32, 0 elsewhere, and everywhere in
    a row without a trainable token. The mask `[B, T]` is bool or numeric."""
    scores_BT = torch.zeros(mask.shape, device=mask.device)
    if mask.numel() == 0:
        return scores_BT
    position_T = torch.arange(1, mask.shape[1] + 1, device=mask.device, dtype=torch.int32)
    end_B = (as_bool(mask) * position_T).amax(dim=1).long()
    rows_R = end_B.nonzero().squeeze(1)
    scores_BT[rows_R, end_B[rows_R] - 1] = rewards.float()[rows_R]
    return scores_BT


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """`(x − μ) · rsqrt(var + 1e-8)` over all trainable tokens, with the unbiased variance.

    The statistics are taken in two passes, `Σ(x − μ)²` rather than `Σx² − nμ²`, which loses every digit when
    the mean is large. Fewer than two trainable tokens are left as they are.

    Args:
        x: `[B, T]`, as the mask, which is bool or numeric; `B` or `T` may be 0.
        group: ranks whose tokens belong together; every one must call, also empty ones. None: this process.

    Returns `[B, T]`, float32, 0 in masked slots.
    """
    mask_BT = as_bool(mask)
    x_BT = select(x, mask_BT).double()
    count, total = _sum_over(torch.stack((mask_BT.sum(dtype=torch.float64), x_BT.sum())), group)
    mean = total / count.clamp(min=1)
    centred_BT = select(x_BT - mean, mask_BT)
    (squares,) = _sum_over(centred_BT.square().sum()[None], group)
    if count < 2:
        return x_BT.float()
    return (centred_BT * torch.rsqrt(squares / (count - 1) + 1e-8)).float()


def _sum_over(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(x, group=group)
    return x
