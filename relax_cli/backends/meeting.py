"""Where the ranks of a process group find each other: on one address of this machine, never on all of them.

torch's stores and gloo's pairs talk to whoever connects, and what ranks exchange is in part unpickled. So ranks on one
machine meet on loopback.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

MEETING_TIME = timedelta(minutes=30)
"""Until all ranks have come; torch's own default."""

LOOPBACK_DEVICE = "lo0" if sys.platform == "darwin" else "lo"


def open_store(address: str, port: int, ranks: int, *, host: bool, timeout: timedelta = MEETING_TIME) -> TCPStore:
    """The store at `address:port`, which the process that is `host` keeps for the others. By itself torch would listen
    on every address of this machine."""
    if not host:
        return TCPStore(address, port, ranks, False, timeout)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family, backlog=max(128, ranks))
    return TCPStore(address, port, ranks, True, timeout, master_listen_fd=listening.detach())


def choose_interface(address: str) -> None:
    """Let gloo listen on loopback where a group's ranks meet there; only the environment tells it. Otherwise it
    resolves the host name, which laptops and containers often cannot."""
    if is_loopback(address):
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK_DEVICE
    elif os.environ.get("GLOO_SOCKET_IFNAME") == LOOPBACK_DEVICE:
        del os.environ["GLOO_SOCKET_IFNAME"]


def is_loopback(address: str) -> bool:
    """Whether other machines cannot reach an address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
