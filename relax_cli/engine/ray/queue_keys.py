"""Keeps strangers out of TransferQueue.

TransferQueue unpickles what its sockets receive, so whoever can send to one of them runs code as the owner of the run.
Here every socket it opens gets ZeroMQ's CURVE: messages are encrypted, and a peer without the run's keys does not get
past the handshake, so nothing of what it sends is ever parsed. The keys travel with Ray's own, authenticated calls and
are in no file, command line or environment.

The public half is a secret as well: it never crosses the network, and no client can start a handshake without it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import zmq

from relax_cli.errors import RunError, problem_kind

QUEUE_UNPROTECTED = problem_kind(
    "queue-unprotected",
    "During a run",
    "A socket of TransferQueue would talk to anybody: its installed version opens sockets in a way that relax does not "
    "know, and it unpickles what it receives. Nothing is trained over such a queue.",
)
QUEUE_TAKEN = problem_kind(
    "queue-taken",
    "During a run",
    "The Ray cluster has the sample queue of another run: the samples of the two would mix.",
)

SOCKET_MAKER = "create_zmq_socket"
USERS = (
    "transfer_queue.utils.zmq_utils",
    "transfer_queue.controller",
    "transfer_queue.storage.simple_storage",
    "transfer_queue.storage.managers.base",
)
"""Modules of TransferQueue 0.1.11 that open sockets, all of them with `create_zmq_socket`."""

ACTORS = (
    ("transfer_queue.interface", "TransferQueueController"),
    ("transfer_queue.storage.bootstrap.simple_storage_bootstrap", "SimpleStorageUnit"),
)
"""Where TransferQueue finds the classes of the Ray actors that listen."""

GREETING_BYTES = 64
"""Of ZeroMQ's protocol: a signature of 10 bytes, two of version, and 20 for the name of the mechanism."""

GREETING_SECONDS = 10.0


@dataclass(frozen=True)
class QueueKeys:
    """The CURVE keys of one run's queue."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> QueueKeys:
        return cls(*zmq.curve_keypair())


def protect_process(keys: QueueKeys) -> None:
    """Every socket that TransferQueue opens in this process from now on needs the run's keys.
    Raises RunError: this TransferQueue opens its sockets in another way."""
    first, *others = [importlib.import_module(name) for name in USERS]
    if not all(hasattr(module, SOCKET_MAKER) for module in (first, *others)):
        raise _unprotected(f"no {SOCKET_MAKER} in one of {', '.join(USERS)}")
    open_plain = inspect.unwrap(vars(first)[SOCKET_MAKER])

    def open_protected(ctx: Any, socket_type: int, ip: str, identity: bytes | None = None) -> Any:
        opened = open_plain(ctx, socket_type, ip, identity)
        if socket_type == zmq.ROUTER:
            opened.curve_server = True
            opened.curve_secretkey = keys.secret
        else:
            opened.curve_serverkey = keys.public
            opened.curve_publickey, opened.curve_secretkey = zmq.curve_keypair()
        return opened

    open_protected.__wrapped__ = open_plain  # type: ignore[attr-defined]
    for name, module in list(sys.modules.items()):
        if name.startswith("transfer_queue") and SOCKET_MAKER in vars(module):
            setattr(module, SOCKET_MAKER, open_protected)


def protect_actors(keys: QueueKeys) -> None:
    """The controller and the storage units that this process starts protect their own processes first.
    Raises RunError: this TransferQueue starts them in another way."""
    import ray

    for place, name in ACTORS:
        module = importlib.import_module(place)
        plain = getattr(vars(module).get(name), "__ray_actor_class__", None)
        if plain is None:
            raise _unprotected(f"no Ray actor {name} in {place}")
        setattr(module, name, ray.remote(num_cpus=1)(_protected(plain, keys)))


def refuse_second_queue() -> None:
    """TransferQueue would join the queue of another run. Raises RunError: this Ray has one."""
    import ray

    with contextlib.suppress(ValueError):
        ray.get_actor("TransferQueueController", namespace="transfer_queue")
        raise RunError(
            QUEUE_TAKEN(
                "another run on this Ray cluster has a sample queue already",
                where="the Ray cluster",
                got="an actor TransferQueueController",
                expected="one run on a cluster at a time",
                fix="wait until the other run has ended, or use another cluster (RAY_ADDRESS)",
            )
        )


def check_protected(addresses: Iterable[tuple[str, int]]) -> None:
    """Greet every listening socket of the queue as a stranger would, and demand that it wants keys.
    Raises RunError: one of them does not."""
    for host, port in addresses:
        mechanism = greet(host, port)
        if mechanism != "CURVE":
            raise _unprotected(f"{host}:{port} answers with the mechanism {mechanism or 'of no ZeroMQ socket'}")


def greet(host: str, port: int) -> str:
    """The mechanism that a ZeroMQ socket demands of its peers: NULL, PLAIN or CURVE."""
    with socket.create_connection((host, port), GREETING_SECONDS) as peer:
        # Signature and version, no mechanism: a socket that demands another one would hang up before it answers.
        peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00")
        answer = b""
        while len(answer) < GREETING_BYTES and (more := peer.recv(GREETING_BYTES - len(answer))):
            answer += more
    return answer[12:32].rstrip(b"\0").decode(errors="replace")


def _protected(plain: type, keys: QueueKeys) -> type:
    def start(self: Any, *args: Any, **options: Any) -> None:
        protect_process(keys)
        plain.__init__(self, *args, **options)  # type: ignore[misc]

    return type(plain.__name__, (plain,), {"__init__": start, "__module__": plain.__module__})


def _unprotected(found: str) -> RunError:
    return RunError(
        QUEUE_UNPROTECTED(
            "the sample queue would accept messages from anybody",
            where="TransferQueue",
            got=found,
            expected="the sockets of TransferQueue 0.1.11",
            fix="pip install TransferQueue==0.1.11",
        )
    )
