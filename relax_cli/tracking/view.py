"""What the live view shows: the state of a run, and its picture for a terminal of a given size."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from relax_cli.tracking.numbers import PHASES, clock_text, count_text, number_text, sparkline
from relax_cli.tracking.run_files import Evaluation, evaluations_of

WATCHED = (
    "reward/mean", "value_loss", "value_clip_frac", "pg_loss", "pg_clip_frac", "ppo_kl", "response_len/mean",
    "explained_variance", "entropy", "actor/grad_norm", "critic/grad_norm", "truncated_frac",
)  # fmt: skip
"""Metrics with a sparkline, those that are read together first."""
FEWEST_WATCHED = 6
METRIC_WIDTH = 38
STEPS_FOR_ETA = 8
WARNINGS_SHOWN = 3
LINES_FOR_STEPS = 4
"""Lines of the terminal that stay free for finished steps."""


@dataclass(frozen=True)
class RunHeader:
    """What stays on the screen during the whole run."""

    run_dir: str = ""
    model: str = ""
    parameters: int | None = None
    """Of the policy; None where they are not known."""
    estimator: str = ""
    device: str = ""
    launcher: str = ""
    roles: Mapping[str, int] = field(default_factory=dict)
    """Processes of each role."""
    draws_more: bool = False
    """Whether prompts are drawn until enough groups differ."""


class RunState:
    """Everything that the picture shows, apart from the size of the terminal."""

    def __init__(self, header: RunHeader, total: int, now: float) -> None:
        self.header = header
        self.total = total
        self.began = now
        self.started: list[tuple[str, float]] = []
        """Finished parts of the start and their seconds."""
        self.activity = ""
        self.phase = ""
        """Of the step, where the activity is one."""
        self.since = now
        self.history: dict[str, list[float]] = {name: [] for name in WATCHED}
        self.evaluations: dict[str, list[Evaluation]] = {}
        """Of each held-out set, in order."""
        self.last: Mapping[str, Any] = {}
        self.phases: dict[str, float] = {}
        """Mean seconds in the last steps that had it."""
        self.eta: float | None = None
        self.shown_at: float | None = None
        self.warnings: deque[str] = deque(maxlen=WARNINGS_SHOWN)
        self._seconds: deque[float] = deque(maxlen=STEPS_FOR_ETA)
        self._phase_seconds: deque[Mapping[str, float]] = deque(maxlen=STEPS_FOR_ETA)

    @property
    def is_starting(self) -> bool:
        """Before the first phase of the first step."""
        return not self.last and not self.phase

    def begin(self, activity: str, phase: str, now: float) -> None:
        """Another activity; an empty one ends the last."""
        if self.is_starting and self.activity:
            self.started.append((self.activity, now - self.since))
        self.activity, self.phase, self.since = activity, phase, now

    def remember(self, record: Mapping[str, Any]) -> None:
        """The metrics and evaluations of a step; of an earlier one where the run is resumed."""
        for name, values in self.history.items():
            if record.get(name) is not None:
                values.append(record[name])
        for evaluation in evaluations_of(record):
            self.evaluations.setdefault(evaluation.name, []).append(evaluation)

    def observe(self, record: Mapping[str, Any], now: float) -> None:
        """A finished step."""
        self.remember(record)
        phases: Mapping[str, float] = record.get("phase_seconds", {})
        self._phase_seconds.append(phases)
        for name in dict.fromkeys(name for step in self._phase_seconds for name in step):
            seconds = [step[name] for step in self._phase_seconds if name in step]
            self.phases[name] = sum(seconds) / len(seconds)
        # The first step's duration excludes start-up.
        self._seconds.append(sum(phases.values()) if self.shown_at is None else now - self.shown_at)
        self.shown_at, self.last = now, record
        self.eta = (self.total - record["step"]) * sum(self._seconds) / len(self._seconds)

    def eta_at(self, now: float) -> float | None:
        """Seconds left, which pass between steps."""
        if self.eta is None or self.shown_at is None:
            return None
        return max(0.0, self.eta - (now - self.shown_at))


def picture(state: RunState, width: int, height: int, now: float) -> RenderableType:
    """The live view; on a low terminal the lines that matter least are left out."""
    evaluations = [_evaluation(found) for found in state.evaluations.values()]
    warnings = [Text(f"! {text}", style="yellow") for text in state.warnings]
    top: list[RenderableType] = [Rule(style="dim"), *_header(state.header)]
    middle: list[RenderableType] = [_progress(state, width, now)]
    if state.activity:
        middle.append(_activity(state, now))
    if state.phases:
        middle.append(_phases(state))
    parts = [*top, *middle, *warnings[-1:]]
    room = max(0, height - LINES_FOR_STEPS - len(parts))
    if state.is_starting:
        finished = [Text(f"  {name}  {seconds:.1f} s", style="dim") for name, seconds in state.started]
        return _lines(*top, *finished[max(0, len(finished) - room) :], *middle, *warnings[-1:])
    columns = max(1, min(4, width // METRIC_WIDTH))
    # On a low terminal every line counts: how fast the run is waits.
    speed = [_speed(state.last)] if room > 3 else []
    room -= len(speed)
    metrics = _metrics(state, columns, width, most=min(room, -(-len(WATCHED) // columns)) * columns)
    room -= metrics.row_count
    shown = evaluations[: max(0, room)]
    room -= len(shown)
    earlier = warnings[:-1][-room:] if room > 0 else []
    return _lines(*top, *middle, metrics, *speed, *shown, *earlier, *warnings[-1:])


def _lines(*parts: RenderableType) -> Group:
    for part in parts:
        if isinstance(part, Text):
            part.no_wrap, part.overflow = True, "ellipsis"
    return Group(*parts)


def _header(header: RunHeader) -> list[RenderableType]:
    size = "" if header.parameters is None else f" ({count_text(header.parameters)} parameters)"
    first = [header.run_dir, f"{header.model}{size}", header.estimator]
    roles = "  ".join(f"{name} {count}" for name, count in header.roles.items())
    second = [roles, f"{header.device}, {header.launcher}".strip(", ")]
    lines = ("   ".join(part for part in parts if part) for parts in (first, second))
    return [Text(line, style="bold" if i == 0 else "dim") for i, line in enumerate(lines) if line]


def _progress(state: RunState, width: int, now: float) -> RenderableType:
    done = state.last.get("step", 0)
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    eta = "done" if done >= state.total else f"eta {clock_text(state.eta_at(now))}"
    share = 100 * done // max(1, state.total)
    text = f"step {done}/{state.total}  {share} %  elapsed {clock_text(now - state.began)}  {eta}"
    grid.add_row(ProgressBar(total=max(1, state.total), completed=done), text)
    return grid


def _activity(state: RunState, now: float) -> Text:
    share = ""
    total = sum(state.phases.values())
    if state.phase in state.phases and total > 0:
        usual = state.phases[state.phase]
        share = f"   usually {usual:.1f} s, {100 * usual / total:.0f} % of a step"
    return Text.assemble((f"{state.activity} … {now - state.since:.0f} s", "bold cyan"), (share, "dim"))


def _phases(state: RunState) -> Text:
    total = sum(state.phases.values()) or 1.0
    text = Text(style="dim")
    for name, seconds in state.phases.items():
        shown = f"{PHASES.get(name, (name,))[0]} {seconds:.1f} s {100 * seconds / total:.0f} %"
        if seconds >= total / 100 or name == state.phase:
            text.append("   " if text else "").append(shown, style="not dim bold cyan" if name == state.phase else "")
    return text


def _metrics(state: RunState, columns: int, width: int, most: int) -> Table:
    found = [name for name, values in state.history.items() if values][: max(most, FEWEST_WATCHED)]
    label = max(map(len, found), default=0)
    spark = max(4, width // columns - label - len("-1.2e-10") - 4)
    grid = Table.grid(padding=(0, 2, 0, 0))
    for start in range(0, len(found), columns):
        cells = []
        for name in found[start : start + columns]:
            value = state.last.get(name)
            cells.append(
                Text.assemble(
                    (f"{name:<{label}} ", "dim"),
                    broken_in_red(f"{number_text(value):>8}"),
                    " ",
                    (f"{sparkline(state.history[name], spark):<{spark}}", "green"),
                )
            )
        grid.add_row(*cells)
    return grid


def _speed(record: Mapping[str, Any]) -> Text:
    parts = [f"{number_text(record.get('tokens_per_second'))} tokens/s"]
    if record.get("memory_gb") is not None:
        parts.append(f"memory {record['memory_gb']:.1f} GB")
    peaks = {name: value for name, value in record.items() if name.endswith("/peak_memory_gb")}
    parts += [f"{name.partition('/')[0]} peak {value:.1f} GB of the GPU" for name, value in peaks.items()]
    return Text("   ".join(parts))


def _evaluation(found: Sequence[Evaluation]) -> Text:
    rewards = [f"{number_text(e.metrics['reward/mean'])} after step {e.step}" for e in found]
    shown = rewards[-1:] if len(rewards) == 1 else [rewards[0], rewards[-1]]
    return Text(f"held-out set {found[0].name}, reward {', '.join(shown)}", style="magenta")


def broken_in_red(text: str) -> Text:
    """The text, in which no NaN or infinity is overlooked."""
    shown = Text(text)
    shown.highlight_regex(r"-?\b(nan|inf)\b", "bold red")
    return shown
