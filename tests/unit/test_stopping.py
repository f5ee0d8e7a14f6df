"""Signals as requests to stop, without a run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from relax_cli.engine import stopping
from relax_cli.engine.stopping import StopRequest
from relax_cli.errors import Terminated


def send(*numbers: signal.Signals) -> None:
    """Send signals to this process, and let their handlers run."""
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0.01)


def test_nothing_to_lose_stops_at_once() -> None:
    stop = StopRequest(lambda _: None)
    with stop.listening():
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        with pytest.raises(Terminated):
            send(signal.SIGTERM)
    assert stop.requested_stop is None


def test_a_request_is_shown_once_and_a_doubled_signal_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "SAME_PRESS", 600.0)
    said: list[str] = []
    stop = StopRequest(said.append)
    before = signal.getsignal(signal.SIGINT)
    with stop.listening():
        stop.doing = "finishing step 7, then saving"
        send(signal.SIGINT, signal.SIGINT, signal.SIGINT)
    assert isinstance(stop.requested_stop, KeyboardInterrupt)
    assert said == ["finishing step 7, then saving; Ctrl-C again stops now"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def hangups_end() -> Iterator[None]:
    """As where nothing above this process, such as nohup, has them ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_second_key_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "SAME_PRESS", 0.0)
    said: list[str] = []
    stop = StopRequest(said.append)
    with stop.listening():
        stop.doing = "finishing step 7, then saving"
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert said[-1] == "stopping now"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_hangup_is_like_sigterm(number: signal.Signals, hangups_end: None) -> None:
    said: list[str] = []
    stop = StopRequest(said.append)
    with stop.listening():
        with pytest.raises(Terminated):
            send(number)
        stop.doing = "finishing step 7, then saving"
        send(number)
    assert isinstance(stop.requested_stop, Terminated)
    assert said == [f"{number.name}: finishing step 7, then saving; Ctrl-C stops now"]


def test_under_nohup_a_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(print).listening():
            send(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("stop", [Terminated(), KeyboardInterrupt()])
def test_a_stop_within_native_code_is_no_bug(stop: BaseException) -> None:
    with pytest.raises(type(stop)), StopRequest(print).listening():
        raise SystemError("wait returned a result with an exception set") from stop
    with pytest.raises(SystemError), StopRequest(print).listening():
        raise SystemError("of something else") from ValueError()


def test_a_terminal_that_has_gone_breaks_nothing(hangups_end: None) -> None:
    master, terminal = os.openpty()
    kept = os.dup(1)
    os.dup2(terminal, 1)
    try:
        stop = StopRequest(lambda _: None)
        os.close(terminal)
        os.close(master)
        with stop.listening():
            stop.doing = "finishing"
            send(signal.SIGHUP)
        assert os.write(1, b"lost") == 4
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def test_sigterm_asks_once_and_ctrl_c_may_follow_at_once() -> None:
    said: list[str] = []
    stop = StopRequest(said.append)
    with stop.listening():
        stop.doing = "finishing step 7, then saving"
        send(signal.SIGTERM, signal.SIGTERM)
        assert isinstance(stop.requested_stop, Terminated)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert said == ["SIGTERM: finishing step 7, then saving; Ctrl-C stops now", "stopping now"]
