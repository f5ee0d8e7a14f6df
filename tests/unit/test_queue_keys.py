"""Nobody without the run's keys gets a byte into TransferQueue, which unpickles what arrives."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_cli.engine.ray.queue_keys import (
    ACTORS,
    SOCKET_MAKER,
    USERS,
    QueueKeys,
    check_protected,
    greet,
    protect_process,
    refuse_second_queue,
)
from relax_cli.errors import RunError
from tests.support.queue_attack import send_hostile

SERVING: list[Any] = []
"""Parts of TransferQueue that tests have started. They serve from threads that cannot be ended, and the ZeroMQ context
of one that is garbage-collected waits for ever for its unsent messages, in the middle of whatever test runs then."""
SENDERS = {"plain": None, "another run's keys": QueueKeys.new()}


@pytest.fixture
def plain_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransferQueue as it is installed, before and after the test."""
    for name in USERS:
        module = importlib.import_module(name)
        monkeypatch.setattr(module, SOCKET_MAKER, vars(module)[SOCKET_MAKER])


@pytest.fixture(params=["controller", "storage"])
def start(request: pytest.FixtureRequest, plain_sockets: None) -> Iterator[Any]:
    """Starts a listening part of TransferQueue in this process; gives its addresses."""
    (place, name) = ACTORS[request.param == "storage"]
    actor = vars(importlib.import_module(place))[name].__ray_actor_class__

    def start() -> list[tuple[str, int]]:
        SERVING.append(actor() if request.param == "controller" else actor({}))
        server = SERVING[-1].zmq_server_info
        return [(server.ip, port) for port in server.ports.values()]

    return start


@pytest.mark.parametrize("sender", SENDERS)
def test_a_stranger_runs_nothing(start: Any, sender: str, tmp_path: Path) -> None:
    protect_process(QueueKeys.new())
    send_hostile(start(), tmp_path, SENDERS[sender])
    assert list(tmp_path.iterdir()) == []


def test_without_protection_a_stranger_does(start: Any, tmp_path: Path) -> None:
    send_hostile(start(), tmp_path, None)
    assert list(tmp_path.iterdir()) != []


def test_with_the_keys_messages_arrive(start: Any, tmp_path: Path) -> None:
    keys = QueueKeys.new()
    protect_process(keys)
    send_hostile(start(), tmp_path, keys)
    assert list(tmp_path.iterdir()) != []


def test_an_unprotected_socket_is_noticed(start: Any) -> None:
    addresses = start()
    assert {greet(*address) for address in addresses} == {"NULL"}
    with pytest.raises(RunError, match="from anybody"):
        check_protected(addresses)
    protect_process(QueueKeys.new())
    check_protected(start())


def test_the_library_opens_sockets_in_known_places() -> None:
    import transfer_queue

    root = Path(transfer_queue.__file__).parent
    makers = {path for path in root.rglob("*.py") if ".socket(" in path.read_text() and "zmq" in path.read_text()}
    users = {path for path in root.rglob("*.py") if f"{SOCKET_MAKER}(" in path.read_text()}
    assert {path.name for path in makers} == {"zmq_utils.py"}
    assert users == {root.parent / (name.replace(".", "/") + ".py") for name in USERS}


@pytest.mark.parametrize("missing", USERS)
def test_another_shape_of_the_library_is_refused(
    missing: str, plain_sockets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(importlib.import_module(missing), SOCKET_MAKER)
    with pytest.raises(RunError) as caught:
        protect_process(QueueKeys.new())
    assert caught.value.problems[0].id == "queue-unprotected"


def test_keys_are_shown_nowhere() -> None:
    keys = QueueKeys.new()
    assert keys.secret.decode() not in repr(keys)
    assert keys.public.decode() not in repr(keys)


def test_a_second_run_on_a_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def no_actor(name: str, namespace: str) -> None:
        raise ValueError(name, namespace)

    monkeypatch.setattr(ray, "get_actor", no_actor)
    refuse_second_queue()
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: object())
    with pytest.raises(RunError) as caught:
        refuse_second_queue()
    assert caught.value.problems[0].id == "queue-taken"
