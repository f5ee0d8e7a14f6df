"""A terminal for one console alone: what others print meanwhile goes to a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from rich.console import Console, ConsoleDimensions


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
