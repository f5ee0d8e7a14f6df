"""Several blocking calls at the same time, given up as soon as one fails."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from relax_cli.errors import RunError

GRACE = 2.0
"""Seconds in which a failure that names a server may follow one that does not: a server that ends breaks both the
connection to it and the group that it was in."""


def fail_fast(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of all calls, in order.

    Raises:
        Exception: the first that a call raised, as soon as it did; a `RunError` where one follows shortly. Calls that
            still run are left behind in threads that do not keep the process alive: a broadcast without a receiver
            cannot be ended from here.
    """
    done: queue.SimpleQueue[tuple[int, Any, Exception | None]] = queue.SimpleQueue()

    def run(index: int, call: Callable[[], Any]) -> None:
        try:
            done.put((index, call(), None))
        except Exception as error:  # noqa: BLE001 - raised in the calling thread
            done.put((index, None, error))

    for index, call in enumerate(calls):
        threading.Thread(target=run, args=(index, call), daemon=True, name="sglang-weights").start()
    results: dict[int, Any] = {}
    while len(results) < len(calls):
        index, result, error = done.get()
        if error is not None:
            raise _better(error, done, len(calls) - len(results) - 1)
        results[index] = result
    return [results[index] for index in range(len(calls))]


def _better(
    first: Exception, done: queue.SimpleQueue[tuple[int, Any, Exception | None]], outstanding: int
) -> Exception:
    deadline = time.monotonic() + GRACE
    while not isinstance(first, RunError) and outstanding:
        try:
            _, _, error = done.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        outstanding -= 1
        first = error if isinstance(error, RunError) else first
    return first
