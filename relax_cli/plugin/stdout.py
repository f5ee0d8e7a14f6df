"""stdout is for results: what others print goes to stderr. Standard library only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from typing import TextIO


@contextmanager
def stdout_as_stderr() -> Iterator[TextIO]:
    """Meanwhile, what Python code, C code and child processes print goes to stderr; yields stdout itself."""
    stdout = stream = sys.stdout
    with ExitStack() as stack:
        with suppress(OSError, ValueError):
            stdout.flush()
            kept = os.dup(1)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, 1)
            os.dup2(2, 1)
            # A stand-in, as tests have them, is written to as it is.
            if stdout.fileno() == 1:
                stream = stack.enter_context(open(kept, "w", encoding=stdout.encoding, errors="replace", closefd=False))
        stack.callback(_flush, sys.__stdout__)
        stack.enter_context(redirect_stdout(sys.stderr))
        yield stream


def _flush(stream: TextIO | None) -> None:
    with suppress(OSError, ValueError, AttributeError):
        stream.flush()  # type: ignore[union-attr]
