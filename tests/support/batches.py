"""Random inputs that the property tests share."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

SEEDS = st.integers(0, 2**31 - 1)
quick = settings(max_examples=40, deadline=None)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_batch(
    seed: int, rows: int, length: int, density: float, *, prefix: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and a bool mask; rows without any trainable token occur."""
    g = rng(seed)
    if prefix:
        mask_BT = torch.arange(length) < torch.randint(0, length + 1, (rows, 1), generator=g)
    else:
        mask_BT = torch.rand(rows, length, generator=g) < density
    return torch.randn(rows, length, generator=g), torch.randn(rows, length, generator=g), mask_BT
