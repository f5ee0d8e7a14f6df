"""The process group in which the actor's first rank (0) broadcasts weights to the ranks of SGLang servers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from relax_cli.backends.meeting import choose_interface, open_store
from relax_cli.backends.rollout.targets import is_this_machine


class UpdateGroup:
    """Rank 0 of a group besides the role's own; the servers are told to join by `/init_weights_update_group`."""

    def __init__(
        self, name: str, address: str, port: int, ranks: int, backend: Literal["gloo", "nccl", "fake"], timeout: float
    ) -> None:
        """Waits until all `ranks` have joined.

        torch makes one default group per process, which is the role's. Servers build theirs with the function that is
        used here, and both sides have to agree on the keys of the store.

        Raises:
            RuntimeError: they did not join within `timeout` seconds.
        """
        self.name = name
        limit = timedelta(seconds=timeout)
        choose_interface(address)
        prefixed = c10d.PrefixStore(name, open_store(address, port, ranks, host=True, timeout=limit))
        make: Any = c10d._new_process_group_helper
        self._group, _ = make(ranks, 0, [], dist.Backend(backend), prefixed, group_name=name, timeout=limit)
        c10d._world.pg_group_ranks[self._group] = {i: i for i in range(ranks)}

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Send tensors, one after the other; they have to live until the servers have answered.
        Raises RuntimeError: the group broke."""
        works = [dist.broadcast(t.contiguous(), 0, group=self._group, async_op=True) for t in tensors]
        for work in works:
            work.wait()

    def leave(self) -> None:
        """End the group on this side."""
        dist.destroy_process_group(self._group)

    def leave_behind(self) -> None:
        """End it without waiting: an unfinished broadcast blocks until its time is over."""
        threading.Thread(target=self.leave, daemon=True, name="sglang-weights").start()


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
