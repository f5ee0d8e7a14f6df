"""How numbers of a run read on a screen: the columns of a step, and plots in text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

PHASES = {
    "rollout": ("gen", "generating"),
    "reference": ("ref", "scoring with the reference"),
    "critic": ("crit", "training the critic"),
    "advantages": ("adv", "computing advantages"),
    "actor": ("act", "training the actor"),
    "updates": ("upd", "training actor and critic"),
    "publish": ("sync", "sending weights"),
    "record": ("rec", "writing samples"),
    "checkpoint": ("save", "saving"),
}
"""Phase of a step to its short name and to what the live view says while it runs."""
PHASES_WIDTH = 44
"""Of the seconds per phase in a line of a terminal."""
BLOCKS = "▁▂▃▄▅▆▇█"
MOST_VALUES = 1000
LONGEST_LABEL = len("-1.23e+100")


@dataclass(frozen=True)
class Column:
    """A metric in the line of a step."""

    title: str
    metric: str
    width: int
    importance: int
    """1 stays longest when the terminal is narrow."""
    of_critic: bool = False


COLUMNS = (
    Column("reward", "reward/mean", 6, 1),
    Column("len", "response_len/mean", 5, 4),
    Column("v_loss", "value_loss", 8, 2, of_critic=True),
    Column("pg_loss", "pg_loss", 8, 3),
    Column("pg_clip", "pg_clip_frac", 7, 6),
    Column("v_clip", "value_clip_frac", 6, 8, of_critic=True),
    Column("kl", "ppo_kl", 8, 5),
    Column("tok/s", "tokens_per_second", 6, 7),
)


DRAWN = Column("drawn", "sampling/prompts", 5, 4)
"""With dynamic sampling: what the batch cost."""


def columns_of(*, has_critic: bool, draws_more: bool = False) -> list[Column]:
    """Those that a run has."""
    found = [column for column in COLUMNS if has_critic or not column.of_critic]
    return [found[0], DRAWN, *found[1:]] if draws_more else found


def fitting_columns(columns: Sequence[Column], width: int, step_width: int) -> tuple[list[Column], bool]:
    """The columns that fit a terminal of `width`, in order, and whether the seconds per phase also fit."""
    left = width - step_width - 1
    chosen = set()
    for column in sorted(columns, key=lambda column: column.importance):
        left -= column.width + 2
        if left < 0:
            break
        chosen.add(column)
    return [column for column in columns if column in chosen], len(chosen) == len(columns) and left >= PHASES_WIDTH


def header_line(columns: Sequence[Column], step_width: int, *, with_phases: bool) -> str:
    """The titles above the lines of steps on a terminal."""
    titles = [f"{'step':>{step_width}}", *(f"{column.title:>{column.width}}" for column in columns)]
    return "  ".join([*titles, "seconds"] if with_phases else titles)


def step_line(record: Mapping[str, Any], total: int, columns: Sequence[Column], *, with_phases: bool) -> str:
    """A step in the columns of a terminal; a dash for what is missing."""
    cells = [step_text(record["step"], total)]
    cells += [f"{number_text(record.get(column.metric)):>{column.width}}" for column in columns]
    return "  ".join([*cells, phase_text(record)] if with_phases else cells)


def plain_line(record: Mapping[str, Any], total: int, eta: float | None, columns: Sequence[Column] = COLUMNS) -> str:
    """One step as a line of ASCII: the same fields in the same order, seconds per phase last."""
    parts = [f"step {step_text(record['step'], total)}", f"eta {clock_text(eta)}"]
    for column in columns:
        value = number_text(record.get(column.metric))
        parts.append(f"{value} {column.title}" if column.title == "tok/s" else f"{column.title} {value}")
    return "  ".join(part for part in (*parts, phase_text(record)) if part)


def number_text(value: float | None) -> str:
    """Three significant digits in at most 8 characters; a dash for None."""
    if value is None:
        return "-"
    size = abs(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:.0f}"
    if size < 0.001 or size >= 1e6:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")
    digits = 3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0
    return f"{value:.{digits}f}"


def count_text(count: int) -> str:
    """Three digits of a large count: 842, 101 k, 4.02 B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def phase_text(record: Mapping[str, Any]) -> str:
    """Seconds per phase, for example `gen 0.2 crit 0.3 act 0.2 sync 0.1`, without those that round to 0."""
    phases: Mapping[str, float] = record.get("phase_seconds", {})
    return " ".join(
        f"{PHASES.get(name, (name, name))[0]} {seconds:.{1 if seconds < 100 else 0}f}"
        for name, seconds in phases.items()
        if seconds >= 0.05
    )


def clock_text(seconds: float | None) -> str:
    """`mm:ss`, or `h:mm:ss` from one hour; a dash for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def step_text(step: int, total: int) -> str:
    """`  7/100`."""
    return f"{step:>{len(str(total))}}/{total}"


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
        filled = [
            0 if value is None else round(_level(value, low, high) * (height * 8 - 1) + 1 - below * 8)
            for value in columns
        ]
        cells = (BLOCKS[min(8, eighths) - 1] if eighths > 0 else " " for eighths in filled)
        lines.append(f"{labels.get(row, ''):>{label_width}} ┤{''.join(cells)}".rstrip())
    return lines


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The course of a metric in one line; a blank where nothing is finite."""
    # Drawn several times a second: of a long run some values are enough.
    columns = _columns(values[:: -max(1, len(values) // MOST_VALUES)][::-1], width)
    low, high = _range(columns)
    return "".join(" " if value is None else BLOCKS[round(_level(value, low, high) * 7)] for value in columns)


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
