"""Keys and values of a batch that is being continued."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relax_cli.models.spec import ModelSpec


@dataclass(frozen=True)
class Prefix:
    """Keys and values `[layers, K, S, D]` of the first tokens of one row."""

    tokens: tuple[int, ...]
    keys: Tensor
    values: Tensor

    def begins(self, prompt: tuple[int, ...]) -> bool:
        """Whether a prompt has these tokens first, and more."""
        return len(prompt) > len(self.tokens) and prompt[: len(self.tokens)] == self.tokens


class KVCache:
    """Keys and values of a batch `[layers, B, K, S, D]`; every row has the same number of columns filled.

    Rows of unequal prompts are padded on the left: the newest position of every row is the same column.
    `starts` says where each row begins (None: all at column 0, no mask needed).
    """

    def __init__(self, spec: ModelSpec, rows: int, columns: int) -> None:
        shape = (spec.num_layers, rows, spec.num_kv_heads, columns, spec.head_dim)
        self.keys = torch.empty(shape)
        self.values = torch.empty(shape)
        self.rows = rows
        self.length = 0
        self.starts: Tensor | None = None
        self._mask_BS: Tensor | None = None

    @property
    def capacity(self) -> tuple[int, int]:
        """Most rows and columns it can hold."""
        return self.keys.shape[1], self.keys.shape[3]

    def reset(self, lengths: Sequence[int]) -> None:
        """Start a new batch with prompts of these lengths."""
        self.rows, self.length = len(lengths), 0
        assert self.rows <= self.capacity[0], "the cache has too few rows"
        self._set_starts(None if len(set(lengths)) == 1 else max(lengths) - torch.tensor(lengths))

    def part(self, first: int, last: int) -> KVCache:
        """Rows `first` to `last` (exclusive) as a cache that writes into this one's storage."""
        piece = object.__new__(KVCache)
        piece.keys, piece.values = self.keys[:, first:last], self.values[:, first:last]
        piece.rows, piece.length = last - first, self.length
        piece._set_starts(None if self.starts is None else self.starts[first:last])
        return piece

    def select(self, rows_B: Tensor) -> None:
        """Make row i a copy of row `rows_B[i]`: drops finished rows, or repeats a prompt for its samples."""
        for layer in (*self.keys, *self.values):
            layer[: len(rows_B), :, : self.length] = layer[:, :, : self.length].index_select(0, rows_B)
        self.rows = len(rows_B)
        self._set_starts(None if self.starts is None else self.starts[rows_B])

    def take(self, row: int, tokens: tuple[int, ...]) -> Prefix:
        """A copy of the first positions of a row, where these tokens are."""
        start = self._start(row)
        columns = slice(start, start + len(tokens))
        return Prefix(tokens, self.keys[:, row, :, columns].clone(), self.values[:, row, :, columns].clone())

    def put(self, row: int, prefix: Prefix | None) -> int:
        """Write the first positions of a row; how many columns are complete then."""
        if prefix is None:
            return 0
        start = self._start(row)
        stop = start + len(prefix.tokens)
        self.keys[:, row, :, start:stop], self.values[:, row, :, start:stop] = prefix.keys, prefix.values
        # Padding is masked, but must be finite.
        self.keys[:, row, :, :start], self.values[:, row, :, :start] = 0, 0
        return stop

    def _start(self, row: int) -> int:
        return 0 if self.starts is None else int(self.starts[row])

    def _set_starts(self, starts_B: Tensor | None) -> None:
        self.starts = starts_B
        if starts_B is not None:
            padding_BS = torch.arange(self.capacity[1]) < starts_B[:, None]
            self._mask_BS = torch.zeros(padding_BS.shape).masked_fill_(padding_BS, -math.inf)

    def step_mask(self) -> Tensor | None:
        """Additive mask `[B, 1, 1, S]` of the newest position, None where nothing is padded."""
        if self.starts is None:
            return None
        assert self._mask_BS is not None
        return self._mask_BS[:, None, None, : self.length]

    def prompt_mask(self, positions: int, kv_heads: int) -> Tensor | None:
        """Additive causal mask `[B * K, 1, P, S]` of the newest positions, None where it is plain causal."""
        if self.starts is None and positions == self.length:
            return None
        future_PS = torch.full((positions, self.length), -math.inf).triu_(1 + self.length - positions)
        if self.starts is None:
            return future_PS
        assert self._mask_BS is not None
        mask_BPS = future_PS + self._mask_BS[:, None, : self.length]
        return mask_BPS.repeat_interleave(kv_heads, 0).unsqueeze(1)
