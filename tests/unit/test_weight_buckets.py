"""Cutting a model into buckets of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_cli.backends.megatron.weight_buckets import as_buckets, plan_buckets

SIZES = st.lists(st.integers(0, 40), max_size=60)


@given(SIZES, st.integers(1, 50))
def test_every_tensor_is_in_one_bucket_of_bounded_size(sizes: list[int], limit: int) -> None:
    counts = plan_buckets(sizes, limit)
    assert sum(counts) == len(sizes)
    assert all(count > 0 for count in counts)
    start = 0
    for count in counts:
        bucket = sizes[start : start + count]
        start += count
        assert sum(bucket) <= limit or count == 1
        # The next tensor did not fit.
        assert start == len(sizes) or sum(bucket) + sizes[start] > limit


@given(SIZES.filter(bool), st.integers(1, 50))
def test_buckets_are_numbered_and_keep_the_order(sizes: list[int], limit: int) -> None:
    named = [(str(i), torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    seen: list[str] = []
    for number, bucket in enumerate(as_buckets(named, {name: len(t) for name, t in named}, limit), 1):
        assert bucket.number == number
        assert bucket.names == {name for name, _ in named}
        assert bucket.is_last == (len(seen) + len(bucket.tensors) == len(sizes))
        seen += [name for name, _ in bucket.tensors]
    assert seen == [name for name, _ in named]


def test_only_one_bucket_is_made_at_a_time() -> None:
    made = []

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(6):
            made.append(i)
            yield str(i), torch.zeros(10, dtype=torch.uint8)

    buckets = as_buckets(named(), dict.fromkeys(map(str, range(6)), 10), 20)
    first = next(buckets)
    assert made == [0, 1]
    assert len(first.tensors) == 2
    next(buckets)
    assert made == [0, 1, 2, 3]
    assert first.tensors == [], "the first bucket's tensors are free before the second is made"
