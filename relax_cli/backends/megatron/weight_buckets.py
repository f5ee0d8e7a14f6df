"""The policy's weights, unsharded and under their Hugging Face names, a bounded number of bytes at a time.

Every rank of the actor makes the same calls: gathering the tensor-parallel parts of a parameter is a collective, and
so is sending them from their pipeline stage to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.experts import of_an_expert_here, owner_of
from relax_cli.checkpoint.store import gather
from relax_cli.models.convert import hf_tensors, megatron_names, merge_shards, split_dimension
from relax_cli.models.spec import ModelSpec


@dataclass(frozen=True)
class Bucket:
    """Some of the weights; `tensors` is emptied when the next bucket is requested, so that only one exists."""

    number: int
    """From 1."""
    count: int
    """Buckets of the whole model."""
    tensors: list[tuple[str, Tensor]]
    """Names and tensors, which may be views of live parameters."""
    names: frozenset[str]
    """Of all weights of the model."""

    @property
    def is_last(self) -> bool:
        """Whether the model is complete after this one."""
        return self.number == self.count


def plan_buckets(sizes: Sequence[int], limit: int) -> list[int]:
    """How many tensors of so many bytes, in their order, go into each bucket of at most `limit` bytes; a larger tensor
    is alone in its own."""
    counts: list[int] = []
    room = -1
    for size in sizes:
        if size > room:
            counts.append(0)
            room = limit
        counts[-1] += 1
        room -= size
    return counts


def as_buckets(named: Iterable[tuple[str, Tensor]], sizes: Mapping[str, int], limit: int) -> Iterator[Bucket]:
    """The tensors, whose bytes by name are `sizes`, as buckets; `named` is read one bucket at a time."""
    counts, stream, names = plan_buckets(list(sizes.values()), limit), iter(named), frozenset(sizes)
    for number, count in enumerate(counts, 1):
        bucket = Bucket(number, len(counts), list(islice(stream, count)), names)
        yield bucket
        bucket.tensors.clear()


def hf_buckets(
    shards: Mapping[str, Tensor], spec: ModelSpec, limit: int, read: Callable[[str], Tensor]
) -> Iterator[Bucket]:
    """All weights of the policy, unsharded, from this rank's part of every parameter by Megatron's (local) names;
    `read` gives what to publish for a name, in the shape and type of its shard."""
    names = megatron_names(spec)
    # Experts of other ranks have the shape of those here.
    alike = {name: name if owner_of(name, spec) is None else of_an_expert_here(name, spec) for name in names}
    mine = {name: (parallel.STAGE.rank, _outline(name, shards[key])) for name, key in alike.items() if key in shards}
    # A tied matrix that two stages have is taken from the first.
    outlines = {name: owned for part in reversed(gather(mine, parallel.STAGE.group)) for name, owned in part.items()}
    sizes = {key: hf.nbytes for name in names for key, hf in hf_tensors(name, outlines[name][1], spec)}

    def on_stage(name: str) -> Tensor:
        owner = owner_of(name, spec)
        if owner is None:
            return unsharded(name, read(name))
        whole = read(name).contiguous() if name in shards else torch.empty_like(shards[alike[name]])
        dist.broadcast(whole, group=parallel.EXPERT.group, group_src=owner)
        return whole

    def everywhere(name: str) -> Tensor:
        stage, outline = outlines[name]
        if parallel.STAGE.size == 1:
            return on_stage(name)
        here = stage == parallel.STAGE.rank
        whole = on_stage(name) if here else torch.empty_like(outline, device=next(iter(shards.values())).device)
        whole = whole.contiguous()
        dist.broadcast(whole, group=parallel.STAGE.group, group_src=stage)
        return whole

    named = (pair for name in names for pair in hf_tensors(name, everywhere(name), spec))
    return as_buckets(named, sizes, limit)


def unsharded(name: str, shard: Tensor) -> Tensor:
    """The whole parameter, on every rank of the tensor-parallel group."""
    ranks = parallel.TENSOR.size
    if ranks == 1 or split_dimension(name) is None:
        return shard
    parts = shard.new_empty((ranks, *shard.shape))
    dist.all_gather(list(parts.unbind()), shard.contiguous(), group=parallel.TENSOR.group)
    return merge_shards(name, parts.unbind())


def _outline(name: str, shard: Tensor) -> Tensor:
    """Shape and type of the whole parameter, without memory."""
    part = torch.empty_like(shard, device="meta")
    return merge_shards(name, [part] * parallel.TENSOR.size)
