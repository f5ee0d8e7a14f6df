"""What the processes of a run listen on."""

from __future__ import annotations

import ipaddress

import psutil

Listening = dict[tuple[str, int], str]
"""Address and port to the name of the process."""


def listening(pid: int) -> Listening:
    """The listening sockets of a process and of all that it started."""
    return {
        tuple(connection.laddr): member.name()
        for member in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
        for connection in member.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


def reachable_from_outside(sockets: Listening) -> Listening:
    """Those that are not on loopback."""

    def is_loopback(host: str) -> bool:
        address = ipaddress.ip_address(host)
        return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)

    return {at: name for at, name in sockets.items() if not is_loopback(at[0])}
