"""Progress of a run on the screen: a live table on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

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
"""Phase of a step to its short name in a line of the table and to what the footer says while it runs."""
LINES_AROUND_ROWS = 5
STEPS_FOR_ETA = 8


@dataclass(frozen=True)
class _Column:
    title: str
    metric: str
    width: int
    importance: int
    """1 stays longest when the terminal is narrow."""


COLUMNS = (
    _Column("reward", "reward/mean", 6, 1),
    _Column("len", "response_len/mean", 5, 4),
    _Column("v_loss", "value_loss", 8, 2),
    _Column("pg_loss", "pg_loss", 8, 3),
    _Column("pg_clip", "pg_clip_frac", 7, 6),
    _Column("v_clip", "value_clip_frac", 6, 8),
    _Column("kl", "ppo_kl", 8, 5),
    _Column("tok/s", "tokens_per_second", 6, 7),
)


class StepDisplay:
    """Shows steps as they finish; a context manager that restores the terminal on any exit.

    Give it a console on stderr. `show` takes the record that is also written to `metrics.jsonl`.
    """

    def __init__(self, console: Console, total_steps: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._total = total_steps
        self._clock = clock
        self._records: deque[Mapping[str, Any]] = deque(maxlen=200)
        self._durations: deque[float] = deque(maxlen=STEPS_FOR_ETA)
        self._shown_at: float | None = None
        self._eta: float | None = None
        self._status = ""
        self._status_since = clock()
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)

    def __enter__(self) -> StepDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            # The last frame stays on the screen, without a phase that has ended.
            self._status = ""
            self._live.stop()

    def status(self, text: str) -> None:
        """Show the current activity, for example `starting Ray`; an empty text removes it.

        Off a terminal only activity before the first step gets a line.
        """
        if text != self._status:
            self._status, self._status_since = text, self._clock()
            if self._live is None and text and not self._records:
                self._print(f"{text} ...")

    def phase(self, name: str) -> None:
        """Show the phase of the current step, on a terminal only: a line per phase would drown the steps."""
        self._status, self._status_since = PHASES.get(name, (name, name))[1], self._clock()

    def note(self, text: str) -> None:
        """Print a permanent line above the table."""
        self._print(text)

    def show(self, record: Mapping[str, Any]) -> None:
        """Show a finished step: `step` (from 1), metrics by name, `phase_seconds`; a dash for what is missing."""
        self._measure(record)
        self._records.append(record)
        self.status("")
        if self._live is None:
            self._print(plain_line(record, self._total, self._eta))
        else:
            self._live.refresh()

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _measure(self, record: Mapping[str, Any]) -> None:
        now = self._clock()
        # The first step's duration excludes start-up.
        phases = sum(record.get("phase_seconds", {}).values())
        self._durations.append(phases if self._shown_at is None else now - self._shown_at)
        self._shown_at = now
        left = self._total - record["step"]
        self._eta = left * sum(self._durations) / len(self._durations)

    def _render(self) -> RenderableType:
        width = self._console.width
        columns, with_phases = fitting_columns(width, len(_step_text(self._total, self._total)))
        parts: list[RenderableType] = []
        if self._records:
            rows = list(self._records)[-max(1, self._console.height - LINES_AROUND_ROWS) :]
            parts.append(_table(rows, self._total, columns, with_phases))
        footer = self._footer(with_phases)
        if footer:
            parts.append(Text(footer, no_wrap=True, overflow="ellipsis"))
        return Group(*parts)

    def _footer(self, with_phases: bool) -> str:
        parts = []
        if self._records:
            last = self._records[-1]
            done = last["step"]
            bar = 20 if self._console.width > 100 else 10
            filled = round(bar * done / self._total)
            parts.append(f"{'━' * filled}{'╌' * (bar - filled)} {100 * done // self._total:3d} %")
            parts.append(f"eta {clock_text(self._eta)}" if done < self._total else "done")
        if self._status:
            parts.append(f"{self._status} … {self._clock() - self._status_since:.0f} s")
        footer = "   ".join(parts)
        if self._records and not with_phases:
            longer = f"{footer}   {phase_text(self._records[-1])}"
            return longer if len(longer) <= self._console.width else footer
        return footer


def fitting_columns(width: int, step_width: int) -> tuple[list[_Column], bool]:
    """The columns that fit a terminal of `width`, in order, and whether the seconds per phase also fit."""
    left = width - step_width - 1
    chosen = set()
    for column in sorted(COLUMNS, key=lambda column: column.importance):
        left -= column.width + 2
        if left < 0:
            break
        chosen.add(column)
    phases_width = 44
    return [column for column in COLUMNS if column in chosen], len(chosen) == len(COLUMNS) and left >= phases_width


def plain_line(record: Mapping[str, Any], total: int, eta: float | None) -> str:
    """One step as a line of ASCII: the same fields in the same order, seconds per phase last."""
    parts = [f"step {_step_text(record['step'], total)}", f"eta {clock_text(eta)}"]
    for column in COLUMNS:
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


def _step_text(step: int, total: int) -> str:
    return f"{step:>{len(str(total))}}/{total}"


def _table(rows: list[Mapping[str, Any]], total: int, columns: list[_Column], with_phases: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("step", justify="right", no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right", min_width=column.width, no_wrap=True)
    if with_phases:
        table.add_column("seconds", no_wrap=True)
    for record in rows:
        cells = [Text(_step_text(record["step"], total))]
        cells += [_cell(record.get(column.metric)) for column in columns]
        if with_phases:
            cells.append(Text(phase_text(record), style="dim"))
        table.add_row(*cells)
    return table


def _cell(value: float | None) -> Text:
    broken = value is not None and not math.isfinite(value)
    return Text(number_text(value), style="bold red" if broken else "dim" if value is None else "")
