"""Messages between the processes of a sandbox."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

NOBODY = 65534
"""The user of the sandbox."""
MOST_BYTES = 1 << 20
"""Of one output, and of one answer of a program."""


def receive(channel: int, most: int = 1 << 32) -> bytes:
    """One message, and nothing of the next. Raises EOFError: the other end is closed, or sends too much."""
    (length,) = struct.unpack("I", exactly(channel, 4))
    if length > most:
        raise EOFError
    return exactly(channel, length)


def exactly(channel: int, length: int) -> bytes:
    """Read so many bytes. Raises EOFError: the other end is closed."""
    found = bytearray()
    while len(found) < length:
        some = os.read(channel, length - len(found))
        if not some:
            raise EOFError
        found += some
    return bytes(found)


def send(channel: int, message: bytes) -> None:
    """Send one message."""
    send_all(channel, struct.pack("I", len(message)) + message)


def send_all(channel: int, message: bytes) -> None:
    """Write all of it."""
    view = memoryview(message)
    while view:
        view = view[os.write(channel, view) :]


def tell(**found: Any) -> None:
    """Send a finding to the process outside."""
    send(1, json.dumps(found).encode())
