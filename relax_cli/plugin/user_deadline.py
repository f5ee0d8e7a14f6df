"""A deadline for code of users that runs in the main thread, where code such as math-verify's must run."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNAL = signal.SIGUSR2
GRACE = 60.0
"""Seconds for code that no signal interrupts, such as a regular expression that never ends, to return to Python."""


class TookTooLong(BaseException):
    """The deadline passed; not an `Exception`, so that the code does not catch it by mistake."""


@contextmanager
def user_deadline(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` in the block after so many seconds.

    Code that cannot be interrupted is ended with its whole process `GRACE` seconds later, after its stack on stderr.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        raise TookTooLong(f"no result after {seconds:g} s")

    before = signal.signal(SIGNAL, interrupt)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), SIGNAL))
    timer.daemon = True
    timer.start()
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()
        signal.signal(SIGNAL, before)
