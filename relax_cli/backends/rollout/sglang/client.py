"""One HTTP request to one SGLang server, with a deadline for the whole exchange and typed errors.

Nothing is sent twice here: whether a failed request may be repeated depends on what it does, so callers decide.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import select
import time
from collections.abc import Callable
from socket import socket
from typing import Any, Literal

from relax_cli.errors import RunError, problem_kinds

declare = problem_kinds("SGLang servers")
SGLANG_REQUEST = declare(
    "sglang-request",
    "A request to a server failed: no connection, no answer in time, or an HTTP error, in the server's own words.",
)

API_KEY = "SGLANG_API_KEY"
"""Environment variable with the key of external servers; a command line would show it to everybody."""
CONTROL_SECONDS = 60.0
"""Deadline of requests that only ask or tell something."""
CHUNK_BYTES = 1 << 20
CANCEL_INTERVAL = 0.2
"""Seconds until a request notices that it is not wanted any more."""

log = logging.getLogger(__name__)

LOOK = "look into the server's log"


class SglangError(RunError):
    """A request to a server failed; which subclass says how."""

    status = 0
    """The HTTP status of a `StatusFault`."""

    @property
    def got(self) -> str:
        """What came instead of a reply, in the server's own words."""
        return self.problems[0].got


class ConnectionFault(SglangError):
    """No connection, or it broke before the reply was complete: whether the server acted is not known."""


class DeadlineFault(SglangError):
    """The reply was not complete in time."""


class CancelledFault(SglangError):
    """The caller stopped waiting."""


class ReplyFault(SglangError):
    """A reply that says it is JSON and is not."""


class StatusFault(SglangError):
    """The server answered with an HTTP status of 400 or above."""


class SglangClient:
    """Talks to the server at `address`; safe to share between threads, a connection per request."""

    def __init__(self, address: str) -> None:
        """`address`: `HOST:PORT`; an IPv6 host in brackets."""
        self.address = address
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)

    def request(
        self,
        method: Literal["GET", "POST"],
        path: str,
        payload: dict[str, Any] | None = None,
        *,
        timeout: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Any:
        """Send one request; what the JSON of its reply says, its text where it is not JSON, None where it is empty.

        Args:
            timeout: seconds for the whole exchange, connecting included.
            cancelled: asked now and then while waiting for the reply; true ends the wait.

        Raises SglangError: there is no such reply; which subclass says why.
        """
        deadline = time.monotonic() + timeout
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        body = None if payload is None else json.dumps(payload).encode()
        headers = {"Connection": "close"} | ({} if body is None else {"Content-Type": "application/json"})
        if key := os.environ.get(API_KEY):
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request(method, path, body, headers)
            # http.client forgets the socket of a connection that closes after the reply.
            link = connection.sock
            if not _wait(link, deadline, cancelled):
                raise self._fault(CancelledFault, path, "was given up before it answered")
            link.settimeout(_left(deadline))
            reply = connection.getresponse()
            if reply.length is None and not reply.chunked:
                # A reply that ends with the connection may have been cut anywhere, even in its headers.
                raise http.client.HTTPException("a reply without a length")
            parts: list[bytes] = []
            while part := reply.read1(CHUNK_BYTES):
                parts.append(part)
                link.settimeout(_left(deadline))
            if reply.length:
                raise http.client.IncompleteRead(b"", reply.length)
        except TimeoutError:
            is_ours = path.startswith(("/generate", "/update_weights", "/init_weights"))
            fix = f"raise --rollout-request-timeout, or {LOOK}" if is_ours else LOOK
            raise self._fault(DeadlineFault, path, f"did not answer within {timeout:g} s", fix=fix) from None
        except (OSError, http.client.HTTPException) as fault:
            words = f"{type(fault).__name__}: {fault}" if str(fault) else type(fault).__name__
            raise self._fault(ConnectionFault, path, "broke the connection", words) from fault
        finally:
            connection.close()
        return self._read(path, reply, b"".join(parts))

    def abort(self, rid: str, seconds: float) -> None:
        """Tell the server that a request is not wanted; where it cannot be told, the request ends by itself."""
        try:
            self.request("POST", "/abort_request", {"rid": rid}, timeout=seconds)
        except SglangError as fault:
            log.info("%s", fault)

    def _read(self, path: str, reply: http.client.HTTPResponse, data: bytes) -> Any:
        content: Any = data.decode(errors="replace") or None
        if content and reply.headers.get_content_type() == "application/json":
            try:
                content = json.loads(data)
            except (ValueError, RecursionError) as fault:
                raise self._fault(ReplyFault, path, "answered with broken JSON", content[:200]) from fault
        if reply.status >= 400:
            error = self._fault(StatusFault, path, f"answered {reply.status}", error_detail(content))
            error.status = reply.status
            raise error
        return content

    def _fault(self, kind: type[SglangError], path: str, what: str, got: str = "", fix: str = LOOK) -> SglangError:
        where = f"http://{self.address}{path}"
        return kind(SGLANG_REQUEST(f"SGLang server {self.address}: {path} {what}", fix=fix, where=where, got=got))


def error_detail(content: Any) -> str:
    """The words of an error reply: SGLang has three JSON shapes, a `success: false` record, and plain text."""
    if isinstance(content, dict):
        error = content.get("error", content.get("message", content.get("detail")))
        content = error.get("message", error) if isinstance(error, dict) else error
    return str(content or "").strip()[:1000]


def _wait(link: socket, deadline: float, cancelled: Callable[[], bool]) -> bool:
    """Wait until there is something to read, or return False once `cancelled`."""
    poll = select.poll()
    poll.register(link, select.POLLIN)
    while not poll.poll(1000 * min(CANCEL_INTERVAL, _left(deadline))):
        if cancelled():
            return False
    return True


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
