"""TCP ports of this machine that are free: to be bound at once, or only after minutes."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST_PORT = 20000
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUAL_LOWEST = 32768
TRIES = 200


def free_port(host: str = "127.0.0.1") -> int:
    """A port of the address `host` that is free now, for a process that binds it at once."""
    return _bound(host, 0)


def lasting_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that outgoing connections do not take meanwhile: for a server that binds it minutes later."""
    lowest = _lowest_ephemeral()
    for port in random.SystemRandom().sample(range(LOWEST_PORT, lowest), min(TRIES, max(0, lowest - LOWEST_PORT))):
        try:
            return _bound(host, port)
        except OSError:
            continue
    return free_port(host)


def _bound(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, port))
        bound: int = probe.getsockname()[1]
        return bound


def _lowest_ephemeral() -> int:
    try:
        lowest, _ = RANGE.read_text("ascii").split()
        return int(lowest)
    except (OSError, ValueError):
        return USUAL_LOWEST
