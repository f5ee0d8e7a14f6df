"""Progress of a run on the screen: a live view on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live
from rich.text import Text

from relax_cli.tracking.numbers import (
    PHASES,
    columns_of,
    fitting_columns,
    header_line,
    plain_line,
    step_line,
    step_text,
)
from relax_cli.tracking.run_files import evaluations_of
from relax_cli.tracking.view import RunHeader, RunState, broken_in_red, picture

REDRAWN_EVERY = 0.25
"""Seconds."""


class StepDisplay:
    """Shows steps as they finish; a context manager that restores the terminal on any exit.

    Give it a console on stderr. `show` takes the record that is also written to `metrics.jsonl`. On a terminal finished
    steps stay above the view that changes.
    """

    def __init__(
        self,
        console: Console,
        total_steps: int,
        header: RunHeader | None = None,
        *,
        log: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """On a terminal, what others print meanwhile goes to the file `log`."""
        self._console = console
        self._clock = clock
        self._log = log
        header = header or RunHeader()
        self._state = RunState(header, total_steps, clock())
        # A display that was told nothing expects a critic's metrics.
        has_critic = not header.roles or "critic" in header.roles
        self._columns = columns_of(has_critic=has_critic, draws_more=header.draws_more)
        self._lines_since_titles: int | None = None
        self._stack = ExitStack()
        self._lock = threading.RLock()
        """Of the state, and of all that is written: rich's own redrawing would lose lines printed at the same time."""
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            # With a log nothing but the console reaches the terminal.
            self._live = Live(
                console=console,
                get_renderable=self._render,
                auto_refresh=False,
                redirect_stdout=log is None,
                redirect_stderr=log is None,
            )

    def __enter__(self) -> StepDisplay:
        if self._live is not None:
            if self._log is not None:
                self._stack.enter_context(only_console(self._console, self._log))
            self._live.start(refresh=True)
            self._stack.callback(self._live.stop)
            ended = threading.Event()
            redrawing = threading.Thread(target=self._redraw, args=(ended,), daemon=True)
            redrawing.start()
            self._stack.callback(redrawing.join)
            self._stack.callback(ended.set)
            self._stack.callback(setattr, sys, "breakpointhook", sys.breakpointhook)
            sys.breakpointhook = self._debug
        return self

    def __exit__(self, *error: object) -> None:
        # The last picture stays on the screen, without a phase that has ended.
        self._state.begin("", "", self._clock())
        self._stack.close()
        if self._live is not None and self._log is not None and self._log.exists():
            self.note(f"what libraries, rewards and plugins printed: {self._log}")

    def _debug(self, *args: Any, **kwargs: Any) -> Any:
        """`breakpoint()` gets the terminal, with one line per step from then on."""
        self._stack.close()
        self._live = None
        return sys.breakpointhook(*args, **kwargs)

    def status(self, text: str) -> None:
        """Show the current activity, for example `starting Ray`; an empty text removes it.

        Off a terminal only activity before the first step gets a line.
        """
        state = self._state
        with self._lock:
            if text != state.activity:
                state.begin(text, "", self._clock())
                if self._live is None and text and not state.last:
                    self.note(f"{text} ...")

    def phase(self, name: str) -> None:
        """Show the phase of the current step, on a terminal only: a line per phase would drown the steps."""
        state, was_starting = self._state, self._state.is_starting
        with self._lock:
            state.begin(PHASES.get(name, (name, name))[1], name, self._clock())
        if was_starting and state.started:
            parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in state.started)
            self.note(f"started in {sum(seconds for _, seconds in state.started):.1f} s: {parts}")

    def warn(self, text: str) -> None:
        """Print a warning, which also stays in the live view until newer ones replace it."""
        with self._lock:
            self.note(f"warning: {text}")
            at = f"step {self._state.last['step']}: " if self._state.last else ""
            self._state.warnings.append(at + text.partition("\n")[0])

    def remember(self, records: Iterable[Mapping[str, Any]]) -> None:
        """What a run that is resumed did before: sparklines and evaluations go on from there."""
        with self._lock:
            for record in records:
                self._state.remember(record)

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """Show what held-out sets gave after a step."""
        with self._lock:
            self._state.remember(record)
            for evaluation in evaluations_of(record):
                self.note(f"step {evaluation.step}: {evaluation.text}")

    def show(self, record: Mapping[str, Any]) -> None:
        """Show a finished step: `step` (from 1), metrics by name, `phase_seconds`; a dash for what is missing."""
        state = self._state
        with self._lock:
            state.observe(record, self._clock())
            self.status("")
            if self._live is None:
                self.note(plain_line(record, state.total, state.eta, self._columns))
            else:
                self._print_row(record)
                self._live.refresh()

    def _print_row(self, record: Mapping[str, Any]) -> None:
        width, height = self._console.size
        step_width = len(step_text(self._state.total, self._state.total))
        columns, with_phases = fitting_columns(self._columns, width, step_width)
        if self._lines_since_titles is None or self._lines_since_titles >= height:
            self._console.print(Text(header_line(columns, step_width, with_phases=with_phases), style="bold"))
            self._lines_since_titles = 0
        self._lines_since_titles += 1
        row = step_line(record, self._state.total, columns, with_phases=with_phases)
        self._console.print(broken_in_red(row), no_wrap=True, overflow="ellipsis")

    def note(self, text: str) -> None:
        """Print a permanent line above the live view."""
        with self._lock:
            # A terminal gets whole words, a file whole lines.
            whole = self._live is None
            self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=whole)

    def _redraw(self, ended: threading.Event) -> None:
        while not ended.wait(REDRAWN_EVERY):
            with self._lock:
                if self._live is not None:
                    self._live.refresh()

    def _render(self) -> RenderableType:
        return picture(self._state, *self._console.size, self._clock())


@contextmanager
def only_console(console: Console, log: Path) -> Iterator[None]:
    """Meanwhile only `console` writes to the terminal; what libraries, rewards and C code print goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        sys.stderr.flush()
        terminal = stack.enter_context(os.fdopen(os.dup(2), "w", encoding=sys.stderr.encoding, errors="replace"))
        if not os.isatty(0):
            # rich asks the standard streams how large the terminal is.
            console.size = ConsoleDimensions(*os.get_terminal_size(terminal.fileno()))
        previous, console.file = console.file, terminal
        stack.callback(setattr, console, "file", previous)
        others = stack.enter_context(log.open("a", buffering=1, encoding="utf-8", errors="backslashreplace"))
        for number in (1, 2):
            kept = os.dup(number)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, number)
            os.dup2(others.fileno(), number)
        stack.enter_context(redirect_stdout(others))
        stack.enter_context(redirect_stderr(others))
        yield
    if not log.stat().st_size:
        log.unlink()
