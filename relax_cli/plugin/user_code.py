"""Calling other people's code: what it prints goes to stderr, whatever it raises becomes one kind of error."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import pluggy

from relax_cli.errors import RelaxError, Terminated
from relax_cli.plugin.stdout import stdout_as_stderr

_STANDARD_LIBRARY = str(Path(os.__file__).parent) + os.sep
_CALLERS = tuple(str(folder) + os.sep for folder in (Path(__file__).parents[1], Path(str(pluggy.__file__)).parent))
_MOST_FRAMES = 8


class UserCodeError(Exception):
    """Code that is not ours raised `__cause__`."""

    def __init__(self, cause: BaseException) -> None:
        self.reason = reason_of(cause)
        """`ValueError: text`."""
        self.frames = own_frames(cause.__traceback__)
        """The user's own frames, outermost first."""
        self.place = place_of(cause)
        """`file:line` where it happened; empty when no file of the user is to blame."""
        super().__init__(self.reason)

    @property
    def story(self) -> str:
        """The reason with the frames that led to it, one a line."""
        frames = [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in self.frames]
        return "\n    ".join([self.reason, *frames[-_MOST_FRAMES:]])


@contextmanager
def user_code(*, passes: tuple[type[BaseException], ...] = (RelaxError,)) -> Iterator[None]:
    """Run user code with stdout kept for data.

    Args:
        passes: errors that pass through as they are; interrupts always do.

    Raises:
        UserCodeError: it raised anything else, `SystemExit` included.
    """
    try:
        with stdout_as_stderr():
            yield
    except BaseException as error:
        if isinstance(error, (*passes, KeyboardInterrupt, Terminated)):
            raise
        raise UserCodeError(error) from error


def reason_of(error: BaseException) -> str:
    """`ValueError: text`, also for an exception that cannot be shown."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 `__str__` is the user's, too
        text = "(its text cannot be shown)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


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


def place_of(error: BaseException) -> str:
    """`file:line` to look at; empty where only libraries were running."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = own_frames(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def from_here(path: str) -> str:
    """A path below the working folder without it, as it was probably typed."""
    with suppress(OSError):
        return path.removeprefix(os.getcwd() + os.sep)
    return path
