"""Where weights go: what an engine says of its servers to the actor that sends to them. Imports nothing heavy."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from relax_cli.backends.ports import free_port


@dataclass(frozen=True)
class WeightTarget:
    """One SGLang server."""

    address: str
    """`HOST:PORT` as the actor reaches it."""
    node: str
    """`this_node()` where the server runs; the host of its address where that is another machine."""
    first_rank: int | None
    """Actor rank in whose bundle (so on whose GPU) the server's first tensor-parallel rank is; the next ranks follow.
    None where nothing is known of its GPUs: a server that was there before the run."""
    ranks: int
    """Tensor-parallel size of the server."""


def this_node() -> str:
    """Name of this machine, the same in all its processes."""
    return socket.gethostname()


def node_of(address: str) -> str:
    """The `WeightTarget.node` of a running server at `HOST:PORT`: this machine where the host is one of its names."""
    host = address.rpartition(":")[0].strip("[]")
    return this_node() if is_this_machine(host) else host


def is_this_machine(host: str) -> bool:
    """Whether a host name or address is this machine's."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        if not ipaddress.ip_address(host).is_loopback:
            free_port(host)  # Only an address of this machine can be bound here.
    except (ValueError, OSError):
        return False
    return True


def own_address(servers: Sequence[str]) -> str:
    """The address of this machine at which the servers (`HOST:PORT`) reach it."""
    hosts = [server.rpartition(":")[0].strip("[]") for server in servers]
    away = [host for host in hosts if not is_this_machine(host)]
    if not away:
        return "127.0.0.1"
    family, kind, protocol, _, place = socket.getaddrinfo(away[0], 9, type=socket.SOCK_DGRAM)[0]
    # Connecting a datagram socket sends nothing; it only chooses the way.
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])
