"""Advantages relative to the other samples of the same prompt.

Paper: Shao et al. 2024, "DeepSeekMath" (GRPO), arXiv:2402.03300. Legend: `B` samples, `T` response tokens
    (padded), `P` prompt groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relax_cli.algorithms.masking import as_bool, select
from relax_cli.algorithms.types import AdvantageInputs, AdvantageOutputs


@torch.no_grad()
def group_advantages(rewards: Tensor, group_ids: Tensor, *, trainable: Tensor, use_std: bool) -> Tensor:
    """`(x − mean) / (std + 1e-6)` within each prompt group, with the unbiased std.

    Equal rewards give exactly 0: sums are float64, in which a multiple of a float32 is exact, and the
    deviation is squared only after the mean was taken off.

    Args:
        rewards: `[B]`; the result is float32 `[B]`.
        group_ids: `[B]`, integers; equal ids belong together, in any order.
        trainable: `[B]`, bool; a sample without a trainable token is out of the baseline and gets 0.
        use_std: False leaves out the division.
    """
    trainable_B = as_bool(trainable)
    rewards_B = select(rewards.float(), trainable_B).double()
    ids_P, group_B = torch.unique(group_ids, return_inverse=True)

    def group_sum(x_B: Tensor) -> Tensor:
        return x_B.new_zeros(ids_P.numel()).index_add_(0, group_B, x_B)

    size_P = group_sum(trainable_B.double())
    mean_P = group_sum(rewards_B) / size_P.clamp(min=1)
    centred_B = select(rewards_B - mean_P[group_B], trainable_B)
    if not use_std:
        return centred_B.float()
    std_P = (group_sum(centred_B.square()) / (size_P - 1).clamp(min=1)).sqrt()
    return (centred_B / (std_P[group_B] + 1e-6)).float()


def advantages(inputs: AdvantageInputs) -> AdvantageOutputs:
    """The group advantage of a sample on each of its trainable tokens; options need `GroupOptions`.

    A KL penalty in the reward is taken off the sample's reward, summed over its trainable tokens.
    """
    mask_BT = as_bool(inputs.mask)
    rewards_B = inputs.rewards.float()
    if inputs.kl is not None:
        rewards_B = rewards_B - select(inputs.kl, mask_BT).sum(dim=1)
    advantages_B = group_advantages(
        rewards_B,
        inputs.group_ids,
        trainable=mask_BT.any(dim=1),
        use_std=not inputs.options.disable_grpo_std_normalization,
    )
    return AdvantageOutputs(advantages=select(advantages_B[:, None].expand(mask_BT.shape), mask_BT))
