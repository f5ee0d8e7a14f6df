"""The processes below another one: what they are, what they listen on. Any of them may end while one looks."""

from __future__ import annotations

import ipaddress
from contextlib import suppress

import psutil

Listening = dict[tuple[str, int], str]
"""Address and port to the name of the process."""


def started_by(pid: int, word: str = "") -> list[psutil.Process]:
    """Those with `word` in their command line that a process has started, directly or not."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [process] if word in " ".join(process.cmdline()) else []
    return found


def listening(pid: int) -> Listening:
    """The listening sockets of a process and of all that it started."""
    found: Listening = {}
    for process in (*started_by(pid), psutil.Process(pid)):
        with suppress(psutil.NoSuchProcess):
            sockets = process.net_connections(kind="inet")
            name = process.name()
            found |= {tuple(socket.laddr): name for socket in sockets if socket.status == psutil.CONN_LISTEN}
    return found


def reachable_from_outside(sockets: Listening) -> Listening:
    """Those that are not on loopback."""

    def is_loopback(host: str) -> bool:
        address = ipaddress.ip_address(host)
        return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)

    return {at: name for at, name in sockets.items() if not is_loopback(at[0])}
