"""One request and what may become of it."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from relax_cli.backends.rollout.sglang.client import (
    SGLANG_REQUEST,
    CancelledFault,
    ConnectionFault,
    DeadlineFault,
    ReplyFault,
    SglangClient,
    SglangError,
    StatusFault,
    error_detail,
)

Answer = Callable[[socket.socket], None]
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], SglangClient]]:
    """A server that answers one connection as told, in raw bytes."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()

    def start(answer: Answer) -> SglangClient:
        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                received = b""
                while b"\r\n\r\n" not in received:
                    received += connection.recv(65536)
                answer(connection)

        threading.Thread(target=run, daemon=True).start()
        return SglangClient(f"127.0.0.1:{listener.getsockname()[1]}")

    yield start
    listener.close()


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (JSON + b'Content-Length: 8\r\n\r\n{"a": 1}', {"a": 1}),
        (JSON + b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n5\r\n": 1}\r\n0\r\n\r\n', {"a": 1}),
        (JSON + b"Content-Length: 4\r\n\r\nnull", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nok", "ok"),
    ],
)
def test_every_form_of_a_reply_is_read(serve: Callable[[Answer], SglangClient], reply: bytes, expected: object) -> None:
    assert serve(lambda link: link.sendall(reply)).request("POST", "/x", {"b": 2}, timeout=30) == expected


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\nContent-Ty",
        JSON + b'\r\n{"a": 1}',
        JSON + b'Content-Length: 9\r\n\r\n{"a": 1}',
        JSON + b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n',
        b"SSH-2.0-OpenSSH\r\n\r\n",
    ],
)
def test_a_reply_that_is_not_complete_is_a_broken_connection(
    serve: Callable[[Answer], SglangClient], reply: bytes
) -> None:
    with pytest.raises(ConnectionFault) as caught:
        serve(lambda link: link.sendall(reply)).request("GET", "/x", timeout=30)
    assert caught.value.got


def test_the_deadline_is_that_of_the_whole_exchange(serve: Callable[[Answer], SglangClient]) -> None:
    def drip(link: socket.socket) -> None:
        link.sendall(JSON + b"Content-Length: 1000\r\n\r\n")
        with suppress(OSError):
            while True:
                link.sendall(b" ")
                time.sleep(0.05)

    started = time.monotonic()
    with pytest.raises(DeadlineFault, match=r"did not answer within 0\.5 s") as caught:
        serve(drip).request("POST", "/update_weights_from_disk", timeout=0.5)
    assert caught.value.problems[0].fix.startswith("raise --rollout-request-timeout")
    assert time.monotonic() - started < 50


def test_a_request_that_is_not_wanted_any_more_ends(serve: Callable[[Answer], SglangClient]) -> None:
    cancelled = threading.Event()
    threading.Timer(0.3, cancelled.set).start()
    started = time.monotonic()
    with pytest.raises(CancelledFault):
        serve(lambda link: time.sleep(60)).request("GET", "/x", timeout=60, cancelled=cancelled.is_set)
    assert time.monotonic() - started < 50


@pytest.mark.parametrize("text", [b"{a}", b"[" * 99999])
def test_json_that_is_none_is_told_from_a_broken_connection(
    serve: Callable[[Answer], SglangClient], text: bytes
) -> None:
    reply = JSON + b"Content-Length: %d\r\n\r\n%b" % (len(text), text)
    with pytest.raises(ReplyFault) as caught:
        serve(lambda link: link.sendall(reply)).request("GET", "/x", timeout=30)
    assert caught.value.got == text.decode()[:200]


@pytest.mark.parametrize(
    ("content", "detail"),
    [
        ({"error": {"message": "bad"}}, "bad"),
        ({"error": "bad"}, "bad"),
        ({"object": "error", "message": "bad", "type": "400"}, "bad"),
        ({"success": False, "message": "bad"}, "bad"),
        ({"detail": "Not Found"}, "Not Found"),
        ("Flush cache failed.\n", "Flush cache failed."),
        (None, ""),
        ([1], "[1]"),
    ],
)
def test_the_words_of_an_error_are_found_in_every_shape(content: object, detail: str) -> None:
    assert error_detail(content) == detail


def test_errors_survive_pickling_between_processes() -> None:
    error = StatusFault(SGLANG_REQUEST("answered 400", fix="look", got="bad"))
    error.status = 400
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, StatusFault)
    assert isinstance(copy, SglangError)
    assert (copy.status, copy.got) == (400, "bad")
    assert copy.problems == error.problems
