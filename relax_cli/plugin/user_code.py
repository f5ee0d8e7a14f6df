"""Calling other people's code: prints go to stderr, any exception is one kind of error, and a deadline ends it."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pluggy

from relax_cli.errors import RelaxError, Terminated
from relax_cli.plugin.stdout import stdout_as_stderr

_STANDARD_LIBRARY = str(Path(os.__file__).parent) + os.sep
_CALLERS = tuple(str(folder) + os.sep for folder in (Path(__file__).parents[1], Path(str(pluggy.__file__)).parent))
_MOST_FRAMES = 8
_FEW_FRAMES = 4


class UserCodeError(Exception):
    """Code that is not ours raised `__cause__`."""

    def __init__(self, cause: BaseException) -> None:
        try:
            text = str(cause)
        except Exception:  # noqa: BLE001 `__str__` is the user's, too
            text = "(its text cannot be shown)"
        kind = type(cause).__name__
        self.reason = f"{kind}: {text}" if text else kind
        """`ValueError: text`."""
        self.frames = own_frames(cause.__traceback__)
        """The user's own frames, outermost first."""
        self.place = f"{self.frames[-1].filename}:{self.frames[-1].lineno}" if self.frames else ""
        """`file:line` where it happened; empty when no file of the user is to blame."""
        if isinstance(cause, SyntaxError) and cause.filename:
            self.place = f"{cause.filename}:{cause.lineno}"
        super().__init__(self.reason)

    @property
    def trail(self) -> str:
        """The last of the frames in one line."""
        frames = self.frames[-_FEW_FRAMES:]
        return " → ".join(f"{Path(f.filename).name}:{f.lineno} in {f.name}: {f.line}" for f in frames)

    @property
    def story(self) -> str:
        """The reason with the frames that led to it, one a line."""
        frames = [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in self.frames]
        return "\n    ".join([self.reason, *frames[-_MOST_FRAMES:]])


@contextmanager
def user_code(
    *, passes: tuple[type[BaseException], ...] = (RelaxError,), seconds: float | None = None
) -> Iterator[None]:
    """Run user code, with a deadline and with stdout kept for data; interrupts and errors of the types `passes` pass.
    Raises UserCodeError: it raised anything else, `SystemExit` included."""
    try:
        with stdout_as_stderr(), nullcontext() if seconds is None else user_deadline(seconds):
            yield
    except BaseException as error:
        if isinstance(error, (*passes, KeyboardInterrupt, Terminated)):
            raise
        raise UserCodeError(error) from error


def own_frames(trace: TracebackType | None) -> tuple[traceback.FrameSummary, ...]:
    """Frames of the user's own files, outermost first: not those of relax, pluggy, Python and the libraries below."""
    frames = [frame for frame in traceback.extract_tb(trace) if not _is_machinery(frame.filename)]
    if not frames:
        return ()
    home = Path(frames[0].filename).parent
    if home.name.endswith("-packages"):  # a module of its own among the libraries
        return tuple(frame for frame in frames if frame.filename == frames[0].filename)
    return tuple(frame for frame in frames if home in Path(frame.filename).parents)


def _is_machinery(filename: str) -> bool:
    standard = filename.startswith(_STANDARD_LIBRARY) and "-packages" not in filename
    return standard or filename.startswith((*_CALLERS, "<frozen "))


def from_here(path: str) -> str:
    """A path below the working folder without it, as it was probably typed."""
    with suppress(OSError):
        return path.removeprefix(os.getcwd() + os.sep)
    return path


_TORCH = (
    ("is_grad_enabled", "set_grad_enabled"),
    ("get_default_dtype", "set_default_dtype"),
    ("get_default_device", "set_default_device"),
    ("get_num_threads", "set_num_threads"),
    ("get_float32_matmul_precision", "set_float32_matmul_precision"),
    ("are_deterministic_algorithms_enabled", "use_deterministic_algorithms"),
    ("is_anomaly_enabled", "set_anomaly_enabled"),
)


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def settings_kept() -> Iterator[None]:
    """Restore torch's global settings, the working folder, the recursion limit and what stops a process after the
    block, where it changed them."""
    folder, torch = "", sys.modules.get("torch")
    with suppress(OSError):  # It was removed.
        folder = os.getcwd()
    depth, handlers = sys.getrecursionlimit(), {number: signal.getsignal(number) for number in STOPS}
    before: dict[str, Any] = {} if torch is None else {read: getattr(torch, read)() for read, _ in _TORCH}
    try:
        yield
    finally:
        for read, write in _TORCH if torch is not None else ():
            if getattr(torch, read)() != before[read]:
                getattr(torch, write)(before[read])
        with suppress(OSError):
            os.chdir(folder)
        sys.setrecursionlimit(depth)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def slowness_told(what: str, seconds: float) -> Iterator[None]:
    """Say on stderr what is waited for, and how long at most, where it takes longer than five seconds."""
    text = f"waiting for {what}, at most {seconds:g} s"
    timer = threading.Timer(SILENT, print, (text,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


SILENT = 5.0
SIGNAL = signal.SIGUSR2
GRACE = 60.0
"""Seconds for code that no signal interrupts, such as a regular expression that never ends, to return to Python."""


class TookTooLong(BaseException):
    """The deadline passed; not an `Exception`, so that the code does not catch it by mistake."""


@contextmanager
def user_deadline(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` in the block after so many seconds. Code that cannot be interrupted is ended with its whole
    process `GRACE` seconds later, after its stack on stderr."""
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
