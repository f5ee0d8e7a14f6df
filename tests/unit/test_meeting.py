"""Ranks meet on one address of this machine, and on loopback where they all are on it."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import psutil
import pytest

from relax_cli.backends.meeting import LOOPBACK_DEVICE, choose_interface, open_store
from relax_cli.backends.ports import free_port

SOON = timedelta(seconds=20)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_a_store_listens_on_its_own_address_only(address: str) -> None:
    port = free_port()
    found = []

    def join() -> None:
        found.append(open_store(address, port, 2, host=False, timeout=SOON).get("key"))

    guest = threading.Thread(target=join)
    guest.start()
    store = open_store(address, port, 2, host=True, timeout=SOON)
    store.set("key", "value")
    guest.join()
    listening = {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
    assert {address_.ip for address_ in listening if address_.port == port} == {address}
    assert found == [b"value"]


@pytest.mark.parametrize(
    ("address", "before", "after"),
    [
        ("127.0.0.1", None, LOOPBACK_DEVICE),
        ("localhost", None, LOOPBACK_DEVICE),
        ("::1", None, LOOPBACK_DEVICE),
        # One machine has no use for the interface that a cluster needs.
        ("127.0.0.1", "eth0", LOOPBACK_DEVICE),
        ("10.0.0.7", None, None),
        ("10.0.0.7", "eth0", "eth0"),
        ("node7", "eth0", "eth0"),
        # The role's ranks were on one machine; the servers that it sends weights to are not.
        ("10.0.0.7", LOOPBACK_DEVICE, None),
    ],
)
def test_gloo_listens_where_the_ranks_meet(
    address: str, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", before or "")
    if before is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    choose_interface(address)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == after
