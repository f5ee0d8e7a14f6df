"""Keys and values of responses that are being generated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relax_cli.models.spec import ModelSpec, MoeSpec

BLOCK = 16
"""Attention covers a multiple of so many columns: a whole vector, so that a row's sums do not depend on how many
columns the others need."""


def in_blocks(columns: int) -> int:
    """The next multiple of `BLOCK`."""
    return -(-columns // BLOCK) * BLOCK


@dataclass(frozen=True)
class Prefix:
    """Keys and values `[layers, K, S, D]` of the first tokens of one row."""

    tokens: tuple[int, ...]
    keys: Tensor
    values: Tensor
    routes: Tensor | None = None
    """`[S, layers, k]`, see `KVCache`."""

    def begins(self, prompt: tuple[int, ...]) -> bool:
        """Whether a prompt has these tokens first, and more."""
        return len(prompt) > len(self.tokens) and prompt[: len(self.tokens)] == self.tokens


@dataclass(frozen=True)
class CachedLayer:
    """Views of one layer of a cache."""

    all_keys: Tensor
    """`[B * K * S, D]`, to write to; `all_values` likewise."""
    all_values: Tensor
    keys: Tensor
    """`[B * K, S, D]` of the columns that are attended to; `values` likewise."""
    values: Tensor


class KVCache:
    """Keys and values `[layers, B, K, S, D]`. Every row begins at column 0 and has its own number of columns filled."""

    def __init__(self, spec: ModelSpec, rows: int, columns: int, *, routes: bool = False) -> None:
        """`routes`: also keep which experts each position went to, `[B, S, layers, k]`; negative where not known."""
        shape = (spec.num_layers, rows, spec.num_kv_heads, in_blocks(columns), spec.head_dim)
        self.keys = torch.zeros(shape)
        self.values = torch.zeros(shape)
        self.lengths_B = torch.zeros(rows, dtype=torch.int64)
        self._bias_BS = torch.full((rows, shape[3]), -math.inf)
        self.routes: Tensor | None = None
        if routes:
            assert isinstance(spec, MoeSpec), "a dense model has no routes"
            self.routes = torch.full((rows, shape[3], shape[0], spec.experts_per_token), -1, dtype=torch.int16)
        self._layers: tuple[int, list[CachedLayer]] = (0, [])
        self._whole, self._rows = self, range(rows)
        self.used = 0
        """Columns that rows have been given; whatever is in the others is of no use."""

    @property
    def capacity(self) -> tuple[int, int]:
        """Most rows and columns it can hold."""
        return self.keys.shape[1], self.keys.shape[3]

    def part(self, first: int, last: int) -> KVCache:
        """Rows `first` to `last` (exclusive) as a cache that writes into this one's storage."""
        piece = object.__new__(KVCache)
        piece.keys, piece.values = self.keys[:, first:last], self.values[:, first:last]
        piece.lengths_B, piece._bias_BS = self.lengths_B[first:last], self._bias_BS[first:last]
        piece._layers = (0, [])
        piece._whole, piece._rows = self._whole, self._rows[first:last]
        piece.routes = None if self.routes is None else self.routes[first:last]
        return piece

    def begin(self, lengths: Sequence[int]) -> None:
        """Make every row one with so many columns, which are still to be written."""
        self._use(in_blocks(max(lengths)), self._rows.start)
        for state in (self.keys, self.values):
            state[:, :, :, : self._whole.used].zero_()
        if self.routes is not None:
            self.routes.fill_(-1)
        self.lengths_B.copy_(torch.tensor(lengths))
        self._bias_BS.zero_().masked_fill_(torch.arange(self.capacity[1]) >= self.lengths_B[:, None], -math.inf)

    def _use(self, columns: int, rows: int) -> None:
        """Clear the further columns of the first rows: what was there before is masked, but must be finite."""
        whole = self._whole
        for state in (whole.keys, whole.values) if columns > whole.used else ():
            state[:, :rows, :, whole.used : columns].zero_()
        whole.used = max(whole.used, columns)

    def extend(self) -> Tensor:
        """Give every row another column; its number `[B, 1]`."""
        places_B1 = self.lengths_B[:, None].clone()
        self._bias_BS.scatter_(1, places_B1, 0.0)
        self.lengths_B += 1
        return places_B1

    def copy_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Make the rows `targets` copies of the rows `sources`."""
        used = (state[:, :, : self._whole.used] for state in (*self.keys, *self.values))
        for state in (*used, self.lengths_B, self._bias_BS, self.routes):
            if state is not None:
                # Slices at a time; `state[targets] = state[sources]` copies number by number.
                state.index_copy_(0, targets, state.index_select(0, sources))

    def take(self, row: int, tokens: tuple[int, ...]) -> Prefix:
        """A copy of the first positions of a row, where these tokens are."""
        columns = slice(len(tokens))
        routes = None if self.routes is None else self.routes[row, columns].clone()
        return Prefix(tokens, self.keys[:, row, :, columns].clone(), self.values[:, row, :, columns].clone(), routes)

    def put(self, row: int, prefix: Prefix | None) -> int:
        """Write the first positions of a row; how many columns are complete then."""
        if prefix is None:
            return 0
        columns = slice(len(prefix.tokens))
        self.keys[:, row, :, columns], self.values[:, row, :, columns] = prefix.keys, prefix.values
        if self.routes is not None and prefix.routes is not None:
            self.routes[row, columns] = prefix.routes
        return len(prefix.tokens)

    def places(self, positions_BP: Tensor) -> Tensor:
        """Where in `CachedLayer.all_keys` these positions of each row are, `[B * P * K]`."""
        rows, heads, columns = self.keys.shape[1:4]
        first_BK = torch.arange(0, rows * heads * columns, columns).view(rows, 1, heads)
        return (first_BK + positions_BP[..., None]).flatten()

    def layers(self, columns: int) -> list[CachedLayer]:
        """Every layer, with its first columns to attend to; made once for the same number of columns."""
        if self._layers[0] != columns:
            self._use(columns, self._rows.stop)
            width = self.keys.shape[4]
            pairs = zip(self.keys, self.values, strict=True)
            made = [
                CachedLayer(k.view(-1, width), v.view(-1, width), *(x[:, :, :columns].flatten(0, 1) for x in (k, v)))
                for k, v in pairs
            ]
            self._layers = (columns, made)
        return self._layers[1]

    def bias(self, columns: int) -> Tensor:
        """Additive mask `[B * K, 1, S]`: what each row has of so many columns."""
        heads = self.keys.shape[2]
        return self._bias_BS[:, None, :columns].expand(-1, heads, -1).reshape(-1, 1, columns)
