"""Context parallelism: each rank has a part of every sample, and its queries meet the keys of all ranks.

R ranks cut a sample into 2·R equally long pieces, and rank r has the pieces r and 2·R−1−r: under a causal mask each has
equally much to do. TransformerEngine's attention expects this order. What a model says about responses is summed up
over the ranks, so that each knows it of whole samples, and roles see no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from relax_cli.backends.megatron import parallel


def pieces() -> int:
    """Into how many pieces a sample is cut: its length has to be a multiple."""
    ranks = parallel.CONTEXT.size
    return 2 * ranks if ranks > 1 else 1


def places_by_rank(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Places in a row of samples that each rank has, ascending, `[R, S / R]`."""
    cut = 2 * parallel.CONTEXT.size
    piece = torch.arange(cut, device=device)
    sizes = torch.tensor(lengths, device=device).div(cut, rounding_mode="floor").repeat_interleave(cut)
    owner_S = (
        torch.minimum(piece, cut - 1 - piece).repeat(len(lengths)).repeat_interleave(sizes, output_size=sum(lengths))
    )
    return owner_S.argsort(stable=True).view(cut // 2, -1)


def own_places(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Places in a row of samples that this rank has, ascending."""
    return places_by_rank(lengths, device)[parallel.CONTEXT.rank]


def from_all_ranks(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """The parts of all ranks, `[S / R, ..]` each, joined in the order of the samples; the gradient is summed up."""
    joined = gather_from_sequence_parallel_region(x, group=parallel.CONTEXT.group)
    return joined.index_select(0, places_by_rank(lengths, x.device).flatten().argsort())  # type: ignore[no-any-return]


def attention(q_BnSd: Tensor, k_BnSd: Tensor, v_BnSd: Tensor, **options: Any) -> Tensor:
    """Causal attention of this rank's queries, two pieces of each sample, to the keys and values of whole samples."""
    rank, size = parallel.CONTEXT.rank, q_BnSd.size(2) // 2
    parts = []
    for q, piece in zip(torch.split(q_BnSd, size, dim=2), (rank, pieces() - 1 - rank), strict=True):
        seen = (piece + 1) * size
        k, v = k_BnSd[:, :, :seen], v_BnSd[:, :, :seen]
        # Kernels of CUDA know this mask. A CPU would write it out all the same, and tensors without memory cannot.
        last = (
            causal_lower_right(size, seen) if q.is_cuda else torch.ones(size, seen, dtype=torch.bool).tril(seen - size)
        )
        parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=last, **options))
    return torch.cat(parts, dim=2)


def whole(grid_BT: Tensor) -> Tensor:
    """The cells of all ranks, each of which has filled its own; each rank's loss is that of whole samples, so its own
    cells get the whole gradient."""
    return reduce_from_tensor_model_parallel_region(grid_BT, group=parallel.CONTEXT.group)  # type: ignore[no-any-return]
