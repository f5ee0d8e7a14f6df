"""Functions of users, called next to the main thread: several at a time, each with a deadline."""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

from relax_cli.plugin.user_code import GRACE, TookTooLong, UserCodeError


def started_loop(name: str) -> asyncio.AbstractEventLoop:
    """An event loop in a thread of its own, which ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
    return loop


class UserCalls:
    """Functions run in threads, as many as are needed, each call for at most so many `seconds`; what they return to be
    awaited runs on one loop, as its authors expect."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = started_loop("relax-user-loop")
        self._running = 0
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._idle = threading.Semaphore(0)

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns. Awaited on a loop that runs no code of users.
        Raises UserCodeError: it raised anything, or took too long."""
        outcome: Future[Any] = Future()
        outcome.set_running_or_notify_cancel()
        self._watch(+1)
        self._tasks.put(partial(self._run, outcome, function, arguments))
        if not self._idle.acquire(blocking=False):
            # Those of the standard library are waited for when the process ends, and one may never return.
            threading.Thread(target=self._work, name="relax-user", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(outcome), self._seconds)
        except TimeoutError:
            late = TookTooLong(f"no result after {self._seconds:g} s")
            raise UserCodeError(late) from late
        finally:
            self._watch(-1)

    def close(self) -> None:
        """Stop the loop; what still runs there ends with the process."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _work(self) -> None:
        while True:
            self._tasks.get()()
            self._idle.release()

    def _run(self, outcome: Future[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        with _blamed(outcome):
            result = function(*arguments)
            if inspect.isawaitable(result):
                asyncio.run_coroutine_threadsafe(_settle(outcome, result), self._loop)
            else:
                outcome.set_result(result)

    def _watch(self, change: int) -> None:
        """Code that never returns to Python, such as a regular expression without end, is ended with its process."""
        self._running += change
        if sys.__stderr__ is None:
            return
        if self._running:
            faulthandler.dump_traceback_later(self._seconds + GRACE, exit=True, file=sys.__stderr__)
        else:
            faulthandler.cancel_dump_traceback_later()


async def _settle(outcome: Future[Any], result: Awaitable[Any]) -> None:
    with _blamed(outcome):
        outcome.set_result(await result)


@contextmanager
def _blamed(outcome: Future[Any]) -> Iterator[None]:
    """Whatever is raised is the outcome: a SystemExit would end its thread, or the loop of all others."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        blamed = UserCodeError(error)
        blamed.__cause__ = error
        outcome.set_exception(blamed)
