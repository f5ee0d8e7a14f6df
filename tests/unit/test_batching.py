"""Who trains which samples: every row exactly once, fairly, and the same plan wherever it is made."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_cli.config.schema import BatchSection, ParallelSection
from relax_cli.roles.batching import (
    Columns,
    chunks_by_length,
    chunks_by_tokens,
    make_micro_batch,
    micro_batch_rows,
    packed_by_tokens,
    pad,
    plan_rows,
    split_balanced,
    stack,
    unpad,
)

LENGTHS = st.lists(st.integers(0, 5000), max_size=60)
thorough = settings(max_examples=200, deadline=None)


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Lengths of a rollout's samples, optimizer steps and ranks; there may be more ranks than samples."""
    steps = draw(st.integers(1, 6))
    size = draw(st.integers(1, 12))
    lengths = draw(st.lists(st.integers(1, 5000), min_size=steps * size, max_size=steps * size))
    return lengths, steps, draw(st.integers(1, 9))


def columns(seed: int, prompt_lens: list[int], response_lens: list[int]) -> Columns:
    """Samples keyed by rows that do not start at 0 and are not contiguous."""
    g = torch.Generator().manual_seed(seed)
    rows = [3 * i + 5 for i in range(len(prompt_lens))]
    lens = list(zip(rows, prompt_lens, response_lens, strict=True))
    return {
        "tokens": {row: torch.randint(1, 99, (p + r,), generator=g) for row, p, r in lens},
        "prompt_lens": {row: torch.tensor(p) for row, p, _ in lens},
        "response_lens": {row: torch.tensor(r) for row, _, r in lens},
        "values": {row: torch.randn(r, generator=g) for row, _, r in lens},
        "rewards": {row: torch.randn((), generator=g) for row, _, _ in lens},
    }


@st.composite
def samples(draw: st.DrawFn) -> Columns:
    count = draw(st.integers(1, 12))
    lens = [draw(st.lists(st.integers(low, 40), min_size=count, max_size=count)) for low in (1, 0)]
    return columns(draw(st.integers(0, 999)), *lens)


# -- ranks and steps -------------------------------------------------------------------------------


@thorough
@given(lengths=LENGTHS, parts=st.integers(1, 9))
def test_a_deal_has_every_position_once_and_counts_equal_to_one(lengths: list[int], parts: int) -> None:
    dealt = split_balanced(lengths, parts)
    assert len(dealt) == parts
    assert sorted(position for part in dealt for position in part) == list(range(len(lengths)))
    counts = [len(part) for part in dealt]
    assert max(counts) - min(counts) <= 1


@thorough
@given(lengths=LENGTHS, parts=st.integers(1, 9))
def test_rank_loads_differ_by_at_most_the_longest_sample(lengths: list[int], parts: int) -> None:
    lengths = lengths[: len(lengths) // parts * parts]
    loads = [sum(lengths[i] for i in part) for part in split_balanced(lengths, parts)]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_long_samples_are_spread_and_short_ones_fill_up() -> None:
    assert split_balanced([8, 7, 6, 5, 4, 3, 2, 1], 2) == [[0, 3, 4, 7], [1, 2, 5, 6]]
    assert split_balanced([1, 1, 100, 1, 100, 1], 2) == [[2, 0, 3], [4, 1, 5]]
    # A rank whose room is used up gets no more, however little it has to do.
    assert split_balanced([10, 1, 1, 1], 2) == [[0, 3], [1, 2]]


def test_more_ranks_than_samples_leave_some_idle() -> None:
    assert split_balanced([4, 9], 4) == [[1], [0], [], []]
    assert split_balanced([], 3) == [[], [], []]


@thorough
@given(plan=plans())
def test_over_ranks_and_steps_every_row_is_trained_exactly_once(plan: tuple[list[int], int, int]) -> None:
    lengths, steps, ranks = plan
    of_ranks = [plan_rows(lengths, steps, ranks, rank) for rank in range(ranks)]
    assert all(len(of_steps) == steps for of_steps in of_ranks)
    dealt = [row for of_steps in of_ranks for rows in of_steps for row in rows]
    assert sorted(dealt) == list(range(len(lengths)))


@thorough
@given(plan=plans())
def test_a_step_trains_its_slice_in_counts_equal_to_one(plan: tuple[list[int], int, int]) -> None:
    lengths, steps, ranks = plan
    size = len(lengths) // steps
    of_ranks = [plan_rows(lengths, steps, ranks, rank) for rank in range(ranks)]
    for step in range(steps):
        rows = [of_steps[step] for of_steps in of_ranks]
        assert sorted(row for own in rows for row in own) == list(range(step * size, (step + 1) * size))
        counts = [len(own) for own in rows]
        assert max(counts) - min(counts) <= 1
        slice_ = lengths[step * size : (step + 1) * size]
        assert rows == [[step * size + i for i in part] for part in split_balanced(slice_, ranks)]


def test_the_batching_plan_is_pinned_as_ranks_never_exchange_it() -> None:
    lengths = [7, 7, 2, 9, 1, 9, 3, 3, 5, 8, 5, 4]
    assert plan_rows(lengths, 2, 3, 0) == [[3, 2], [9, 7]]
    assert plan_rows(lengths, 2, 3, 1) == [[5, 4], [8, 11]]
    assert plan_rows(lengths, 2, 3, 2) == [[0, 1], [10, 6]]


def test_equal_lengths_are_dealt_in_row_order() -> None:
    assert plan_rows([5] * 8, 2, 2, 0) == [[0, 2], [4, 6]]
    assert plan_rows([5] * 8, 2, 2, 1) == [[1, 3], [5, 7]]


# -- micro-batches ---------------------------------------------------------------------------------


@thorough
@given(batch=samples(), size=st.integers(1, 14), data=st.data())
def test_chunks_have_every_row_once_and_ascend_in_length(batch: Columns, size: int, data: st.DataObject) -> None:
    rows = data.draw(st.permutations(list(batch["tokens"])))
    chunks = chunks_by_length(batch, rows, size)
    flat = [row for chunk in chunks for row in chunk]
    assert sorted(flat) == sorted(rows)
    assert all(len(chunk) == size for chunk in chunks[:-1])
    assert 1 <= len(chunks[-1]) <= size
    lengths = [batch["tokens"][row].numel() for row in flat]
    assert lengths == sorted(lengths)
    # The order the rows came in does not matter.
    assert chunks == chunks_by_length(batch, sorted(rows), size)


def test_no_rows_make_no_chunks() -> None:
    assert chunks_by_length({}, [], 4) == []
    assert chunks_by_tokens({}, [], 4) == []


@thorough
@given(batch=samples(), budget=st.integers(1, 400), data=st.data())
def test_chunks_by_tokens_have_every_row_once_within_the_budget(
    batch: Columns, budget: int, data: st.DataObject
) -> None:
    rows = data.draw(st.permutations(list(batch["tokens"])))
    chunks = chunks_by_tokens(batch, rows, budget)
    flat = [row for chunk in chunks for row in chunk]
    assert sorted(flat) == sorted(rows)
    lengths = [batch["tokens"][row].numel() for row in flat]
    assert lengths == sorted(lengths)
    for chunk in chunks:
        padded = make_micro_batch(batch, chunk, ()).tokens_BS
        assert padded.numel() <= budget or len(chunk) == 1
    # No fewer would do: the first sample of a chunk did not fit into the one before.
    for chunk, following in itertools.pairwise(chunks):
        assert (len(chunk) + 1) * batch["tokens"][following[0]].numel() > budget
    assert chunks == chunks_by_tokens(batch, sorted(rows), budget)


def test_padding_counts_towards_the_token_budget() -> None:
    batch = columns(0, [2, 2, 2, 8], [0, 0, 0, 2])
    rows = list(batch["tokens"])
    # 2 + 2 + 2 + 10 tokens would be 16, but padded they are 4 x 10.
    assert chunks_by_tokens(batch, rows, 16) == [rows[:3], rows[3:]]
    assert chunks_by_tokens(batch, rows, 39) == [rows[:3], rows[3:]]
    assert chunks_by_tokens(batch, rows, 40) == [rows]
    assert chunks_by_tokens(batch, rows, 5) == [rows[:2], rows[2:3], rows[3:]]


def test_micro_batches_count_samples_or_tokens_by_option() -> None:
    batch = columns(0, [2, 2, 2, 8], [0, 0, 0, 2])
    rows = list(batch["tokens"])
    by_samples = BatchSection(micro_batch_size=3)
    assert micro_batch_rows(batch, rows, by_samples, packed=False) == [rows[:3], rows[3:]]
    by_tokens = BatchSection(micro_batch_size=1, use_dynamic_batch_size=True, max_tokens_per_gpu=16)
    assert micro_batch_rows(batch, rows, by_tokens, packed=False) == [rows[:3], rows[3:]]
    assert micro_batch_rows(batch, rows, by_tokens, packed=True) == [[rows[3], *rows[:3]]]


@thorough
@given(batch=samples(), budget=st.integers(1, 400), data=st.data())
def test_packed_chunks_have_every_row_once_within_the_budget(batch: Columns, budget: int, data: st.DataObject) -> None:
    rows = data.draw(st.permutations(list(batch["tokens"])))
    chunks = packed_by_tokens(batch, rows, budget)
    assert sorted(row for chunk in chunks for row in chunk) == sorted(rows)
    sizes = [sum(batch["tokens"][row].numel() for row in chunk) for chunk in chunks]
    assert all(size <= budget or len(chunk) == 1 for size, chunk in zip(sizes, chunks, strict=True))
    # What goes through the layers stays below: the last token of a sample does not.
    made = [make_micro_batch(batch, chunk, (), packed=True) for chunk in chunks]
    passed = [micro.laid_out()[0].numel() for micro in made]
    assert all(p <= max(size, 1) for p, size in zip(passed, sizes, strict=True))
    # Two chunks that fit into one would have been one.
    assert all(a + b > budget for a, b in itertools.combinations(sizes, 2))
    assert chunks == packed_by_tokens(batch, sorted(rows), budget)


@thorough
@given(batch=samples(), packed=st.booleans())
def test_the_states_of_a_row_predict_the_response_tokens(batch: Columns, packed: bool) -> None:
    rows = list(batch["tokens"])
    micro = make_micro_batch(batch, rows, (), packed=packed)
    tokens, response = micro.laid_out()
    # Hidden states are [S, B, H]; of a packed row B is 1.
    following = torch.cat([tokens.T.flatten(), tokens.new_zeros(1)])
    stride = 1 if packed else len(rows)
    grid = response.to_grid(response.tokens_N)
    for i, row in enumerate(rows):
        prompt, length = int(batch["prompt_lens"][row]), int(batch["response_lens"][row])
        assert grid[i, :length].tolist() == batch["tokens"][row][prompt:].tolist()
        mine = response.states_N[response.cells_N // max(response.shape[1], 1) == i]
        assert mine.tolist() == [int(mine[0]) + t * stride for t in range(length)] if length else not mine.numel()
        # The state of token t - 1 predicts token t: what lies there is the token before.
        assert following[mine].tolist() == batch["tokens"][row][prompt - 1 : prompt - 1 + length].tolist()
    if packed:
        lengths = [max(batch["tokens"][row].numel() - 1, 1) for row in rows]
        assert response.lengths == tuple(sorted(lengths, reverse=True))
        assert tokens.shape == (1, sum(lengths))


@thorough
@given(batch=samples(), data=st.data())
def test_a_micro_batch_is_left_aligned_and_zero_padded(batch: Columns, data: st.DataObject) -> None:
    rows = data.draw(st.permutations(list(batch["tokens"])))
    rows = rows[: data.draw(st.integers(1, len(rows)))]
    micro = make_micro_batch(batch, rows, ["values", "rewards"])
    assert micro.tokens_BS.shape == (len(rows), max(batch["tokens"][row].numel() for row in rows))
    assert micro.fields["values"].shape == (len(rows), max(batch["values"][row].numel() for row in rows))
    assert micro.fields.keys() == {"values", "rewards"}
    for i, row in enumerate(rows):
        tokens, values = batch["tokens"][row], batch["values"][row]
        assert torch.equal(micro.tokens_BS[i, : tokens.numel()], tokens)
        assert not micro.tokens_BS[i, tokens.numel() :].any()
        assert torch.equal(micro.fields["values"][i, : values.numel()], values)
        assert not micro.fields["values"][i, values.numel() :].any()
        assert micro.fields["rewards"][i] == batch["rewards"][row]
        assert (micro.prompt_lens_B[i], micro.response_lens_B[i]) == (
            batch["prompt_lens"][row],
            batch["response_lens"][row],
        )


@thorough
@given(batch=samples(), data=st.data(), extra=st.integers(0, 9))
def test_unpadding_undoes_padding_and_owns_its_memory(batch: Columns, data: st.DataObject, extra: int) -> None:
    rows = data.draw(st.permutations(list(batch["tokens"])))
    width = max(batch["values"][row].numel() for row in rows) + extra
    padded_BT = stack(batch, "values", rows, width)
    back = unpad(padded_BT, rows, batch["response_lens"])
    padded_BT.fill_(-1.0)
    assert back.keys() == set(rows)
    assert all(torch.equal(back[row], batch["values"][row]) for row in rows)


def test_padding_keeps_the_type() -> None:
    for dtype in (torch.int64, torch.float32, torch.bool):
        padded = pad([torch.ones(2, dtype=dtype), torch.ones(0, dtype=dtype)], 3)
        assert padded.dtype == dtype
        assert padded.tolist() == [[1, 1, 0], [0, 0, 0]]


def test_a_token_budget_counts_the_tokens_of_one_rank() -> None:
    batch = columns(0, [2, 2, 2, 8], [0, 0, 0, 2])
    rows = list(batch["tokens"])
    layout = ParallelSection(context_parallel_size=2)
    # Two of four pieces: samples of 2 and 10 tokens become 4 and 12.
    assert [layout.tokens_of_rank(length) for length in (1, 2, 4, 5, 10, 12)] == [2, 2, 2, 4, 6, 6]
    by_tokens = BatchSection(micro_batch_size=1, use_dynamic_batch_size=True, max_tokens_per_gpu=12)
    assert micro_batch_rows(batch, rows, by_tokens, False, layout.tokens_of_rank) == [rows[:3], rows[3:]]
    assert micro_batch_rows(batch, rows, by_tokens, True, layout.tokens_of_rank) == [[rows[3], *rows[:3]]]
