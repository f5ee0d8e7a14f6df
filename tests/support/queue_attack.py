"""Messages to a listening socket that run code where they are unpickled."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from relax_cli.engine.ray.queue_keys import QueueKeys

SENDING_MILLISECONDS = 2000
ARRIVAL_SECONDS = 0.5


class Hostile:
    """Unpickled, it makes a folder."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def send_hostile(addresses: Iterable[tuple[str, int]], traces: Path, keys: QueueKeys | None) -> None:
    """Send to each address a message that makes `traces/PORT`, in the forms that TransferQueue reads."""
    from transfer_queue.utils.serial_utils import encode

    context = zmq.Context()
    peers = []
    for host, port in addresses:
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.IDENTITY, b"TQ_STORAGE_stranger")
        # A port that does not speak ZeroMQ ends the connection, and a message to nobody would wait for ever.
        peer.setsockopt(zmq.SNDTIMEO, SENDING_MILLISECONDS)
        if keys is not None:
            peer.curve_serverkey = keys.public
            peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
        peer.connect(f"tcp://{host}:{port}")
        hostile = Hostile(traces / str(port))
        with suppress(zmq.Again):
            peer.send_multipart(encode({"request_type": "PUT", "body": hostile}))
            peer.send_multipart([b"", pickle.dumps(hostile)])
        peers.append(peer)
    time.sleep(ARRIVAL_SECONDS)
    for peer in peers:
        peer.close(linger=0)
    context.term()
