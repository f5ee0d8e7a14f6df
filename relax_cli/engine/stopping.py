"""Graceful shutdown at Ctrl-C, SIGTERM or SIGHUP: finish and save the current step, then exit."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from relax_cli.errors import Terminated

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SAME_PRESS = 0.3
"""Seconds within which a second SIGINT is the same key: a parent often passes on a signal that relax also got."""


@contextmanager
def undisguised_stop() -> Iterator[None]:
    """What a signal handler raised, where native code that it interrupted made a SystemError of it, as Ray's does."""
    try:
        yield
    except SystemError as error:
        if isinstance(error.__cause__, (KeyboardInterrupt, Terminated)):
            raise error.__cause__ from None
        raise


class StopRequest:
    """Whether someone wants the run to end.

    `doing` says what is under way that would be lost, for example `finishing step 7, then saving`. While it is empty,
    as it is until the first step, a signal stops at once.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._unsaid: SimpleQueue[str | None] = SimpleQueue()
        self._pressed_at = 0.0
        self._terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        self.doing = ""
        self.requested_stop: KeyboardInterrupt | Terminated | None = None
        """What the run should end as; None while it may continue."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals request a stop inside the block. Where nothing would be lost, and at the second Ctrl-C, they raise
        KeyboardInterrupt, or Terminated for SIGTERM and SIGHUP."""

        # Printing in a signal handler can meet the same stream in the middle of a line: another thread does it.
        def print_all() -> None:
            while (message := self._unsaid.get()) is not None:
                self._say(message)

        printer = threading.Thread(target=print_all, name="stop-messages", daemon=True)
        printer.start()
        previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        signal.signal(signal.SIGINT, self._on_ctrl_c)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if previous[signal.SIGHUP] != signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, self._on_sigterm)
        try:
            with undisguised_stop():
                yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._unsaid.put(None)
            printer.join()

    def _on_ctrl_c(self, *_: object) -> None:
        if not self.doing:
            raise KeyboardInterrupt
        if time.monotonic() - self._pressed_at < SAME_PRESS:
            return
        if self.requested_stop is not None:
            self._unsaid.put("stopping now")
            raise KeyboardInterrupt
        self._pressed_at = time.monotonic()
        self._request(KeyboardInterrupt(), f"{self.doing}; Ctrl-C again stops now")

    def _on_sigterm(self, number: int, _: object) -> None:
        # Output to a terminal that has gone goes nowhere: it must not end the run before it has saved.
        for stream in self._terminals if number == signal.SIGHUP else ():
            if not os.isatty(stream):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)
        if not self.doing:
            raise Terminated
        if self.requested_stop is None:
            self._request(Terminated(), f"{signal.Signals(number).name}: {self.doing}; Ctrl-C stops now")

    def _request(self, end: KeyboardInterrupt | Terminated, message: str) -> None:
        self.requested_stop = end
        self._unsaid.put(message)
