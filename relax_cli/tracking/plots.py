"""A plot in text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"
MOST_VALUES = 1000
LONGEST_LABEL = len("-1.23e+100")


def curve(values: Sequence[float | None], width: int, height: int) -> list[str]:
    """A bar plot of `height` lines, at most `width` wide, with the highest and lowest value on its axis.

    Neighbours are averaged where there are more values than columns; values that are not finite leave a gap.
    """
    assert height >= 2, height
    columns = _columns(values, max(1, width - LONGEST_LABEL - 2))
    low, high = _range(columns)
    labels = {0: f"{high:.3g}", height - 1: f"{low:.3g}"} if any(value is not None for value in columns) else {}
    label_width = max(map(len, labels.values()), default=0)
    lines = []
    for row in range(height):
        below = height - 1 - row
        cells = [
            " " if value is None else _cell(_level(value, low, high) * (height * 8 - 1) + 1 - below * 8)
            for value in columns
        ]
        lines.append(f"{labels.get(row, ''):>{label_width}} ┤{''.join(cells)}".rstrip())
    return lines


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The course of a metric in one line; a blank where nothing is finite."""
    # Drawn several times a second: of a long run some values are enough.
    columns = _columns(values[:: -max(1, len(values) // MOST_VALUES)][::-1], width)
    low, high = _range(columns)
    return "".join(" " if value is None else BLOCKS[round(_level(value, low, high) * 7)] for value in columns)


def _cell(eighths: float) -> str:
    """The part of a bar inside one character cell, which it fills by so many eighths."""
    filled = min(8, round(eighths))
    return " " if filled <= 0 else BLOCKS[filled - 1]


def _columns(values: Sequence[float | None], width: int) -> list[float | None]:
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)] if count else []
    parts = [[v for v in values[a:b] if v is not None and math.isfinite(v)] for a, b in pairwise(edges)]
    return [sum(part) / len(part) if part else None for part in parts]


def _range(columns: Sequence[float | None]) -> tuple[float, float]:
    finite = [value for value in columns if value is not None]
    return (min(finite), max(finite)) if finite else (0.0, 0.0)


def _level(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5
