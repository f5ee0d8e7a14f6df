"""Which rank trains which samples, and how they are padded into micro-batches.

Legend: `B` samples, `S` prompt + response, `T` response tokens. A *row* is a sample's number within its rollout.
Every rank computes the same plan from the same lengths, so no rank has to be told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from relax_cli.backends.megatron.micro_batch import MicroBatch
from relax_cli.config.schema import BatchSection
from relax_cli.plugin.graph import ROUTES
from relax_cli.roles.context import SampleQueue

Columns: TypeAlias = dict[str, dict[int, Tensor]]
"""Field name to row to that sample's tensor (1-D, or a scalar)."""


def read_columns(queue: SampleQueue, rollout_id: int, rows: Sequence[int], names: Sequence[str]) -> Columns:
    fields = queue.get(rollout_id, rows, names)
    return {name: dict(zip(rows, values, strict=True)) for name, values in fields.items()}


def write_columns(queue: SampleQueue, rollout_id: int, columns: Columns) -> None:
    """Columns of the same rows to the queue; does nothing without rows."""
    if rows := sorted(next(iter(columns.values()))):
        queue.put(rollout_id, rows, {name: [values[row] for row in rows] for name, values in columns.items()})


def split_balanced(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Deal positions `0..n-1` to `parts` ranks: equal counts (to one), token sums as even as greedy dealing gets.

    Longest first to the least loaded rank that still has room; deterministic, so that all ranks agree.
    """
    room = [len(lengths) // parts + (part < len(lengths) % parts) for part in range(parts)]
    load = [0] * parts
    dealt: list[list[int]] = [[] for _ in range(parts)]
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        part = min((p for p in range(parts) if len(dealt[p]) < room[p]), key=lambda p: (load[p], p))
        dealt[part].append(position)
        load[part] += lengths[position]
    return dealt


def plan_rows(lengths: Sequence[int], steps: int, ranks: int, rank: int) -> list[list[int]]:
    """Rows of `rank` for each optimizer step of a rollout.

    Step k takes the k-th contiguous slice of the samples, so groups stay together and a resumed run repeats it.
    """
    assert len(lengths) % steps == 0, "batch arithmetic is checked before launch"
    size = len(lengths) // steps
    return [
        [first + i for i in split_balanced(lengths[first : first + size], ranks)[rank]]
        for first in range(0, len(lengths), size)
    ]


def chunks_by_length(columns: Columns, rows: Sequence[int], size: int) -> list[list[int]]:
    """Chunks of at most `size` rows, neighbours in length together, so that little padding is computed."""
    tokens = columns.get("tokens", {})
    by_length = sorted(rows, key=lambda row: (tokens[row].numel(), row))
    return [by_length[first : first + size] for first in range(0, len(by_length), size)]


def chunks_by_tokens(
    columns: Columns, rows: Sequence[int], budget: int, tokens_of_rank: Callable[[int], int] = int
) -> list[list[int]]:
    """The fewest chunks of neighbours in length whose padded size, rows x longest, is at most `budget` tokens.

    The padding counts, because it is computed and stored like any other token. A sample that is longer than the
    budget gets a chunk of its own. `tokens_of_rank`: how many tokens of a sample with so many one rank has.
    """
    tokens = columns.get("tokens", {})
    chunks: list[list[int]] = []
    for row in sorted(rows, key=lambda row: (tokens[row].numel(), row)):
        # Ascending, so this row is the longest of any chunk that it joins.
        if chunks and (len(chunks[-1]) + 1) * tokens_of_rank(tokens[row].numel()) <= budget:
            chunks[-1].append(row)
        else:
            chunks.append([row])
    return chunks


def packed_by_tokens(
    columns: Columns, rows: Sequence[int], budget: int, tokens_of_rank: Callable[[int], int] = int
) -> list[list[int]]:
    """Few chunks of at most `budget` tokens each, without padding: the longest first, into the first that has room.
    A sample that is longer than the budget gets a chunk of its own."""
    tokens = columns.get("tokens", {})
    chunks: list[list[int]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda row: (-tokens[row].numel(), row)):
        size = tokens_of_rank(tokens[row].numel())
        place = next((i for i, left in enumerate(room) if size <= left), len(chunks))
        if place == len(chunks):
            chunks.append([])
            room.append(budget)
        chunks[place].append(row)
        room[place] -= size
    return chunks


def micro_batch_rows(
    columns: Columns,
    rows: Sequence[int],
    batch: BatchSection,
    packed: bool,
    tokens_of_rank: Callable[[int], int] = int,
) -> list[list[int]]:
    """The given rows as micro-batches, by samples or, with `--use-dynamic-batch-size`, by tokens."""
    if not batch.use_dynamic_batch_size:
        return chunks_by_length(columns, rows, batch.micro_batch_size)
    assert batch.max_tokens_per_gpu is not None, "checked before launch"
    fill = packed_by_tokens if packed else chunks_by_tokens
    return fill(columns, rows, batch.max_tokens_per_gpu, tokens_of_rank)


def pad(rows: Sequence[Tensor], width: int) -> Tensor:
    """Right-pad 1-D tensors with 0 to `[B, width]`."""
    out = rows[0].new_zeros(len(rows), width)
    for i, row in enumerate(rows):
        out[i, : row.numel()] = row
    return out


def stack(columns: Columns, name: str, rows: Sequence[int], width: int) -> Tensor:
    """One field of the given rows: 1-D samples padded to `[B, width]`, scalars as `[B]`."""
    values = [columns[name][row] for row in rows]
    return torch.stack(values) if values[0].dim() == 0 else pad(values, width)


def make_micro_batch(
    columns: Columns, rows: Sequence[int], names: Sequence[str], *, packed: bool = False
) -> MicroBatch:
    response_lens_B = stack(columns, "response_lens", rows, 0)
    width_T = int(response_lens_B.max())
    width_S = max(columns["tokens"][row].numel() for row in rows)
    return MicroBatch(
        tokens_BS=stack(columns, "tokens", rows, width_S),
        prompt_lens_B=stack(columns, "prompt_lens", rows, 0),
        response_lens_B=response_lens_B,
        fields={name: stack(columns, name, rows, width_T) for name in names},
        packed=packed,
        routes_BSr=stack_routes(columns, rows, width_S),
    )


def stack_routes(columns: Columns, rows: Sequence[int], width: int) -> Tensor | None:
    """Routes of the given rows `[B, width, layers·k]`; None where none are known."""
    found = [columns[ROUTES][row] for row in rows] if ROUTES in columns else []
    # The last token of a sample has none.
    known = {i: flat.view(columns["tokens"][rows[i]].numel() - 1, -1) for i, flat in enumerate(found) if flat.numel()}
    if not known:
        return None
    routes_BSr = next(iter(known.values())).new_full((len(rows), width, next(iter(known.values())).size(1)), -1)
    for i, routes in known.items():
        routes_BSr[i, : len(routes)] = routes
    return routes_BSr


def unpad(values_BT: Tensor, rows: Sequence[int], lengths: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Cut padded rows back to their lengths; each owns its memory."""
    return {row: values_BT[i, : int(lengths[row])].clone() for i, row in enumerate(rows)}
