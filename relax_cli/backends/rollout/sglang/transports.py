"""The ways of weights to servers: shared memory of one node, a process group over nodes.

Every rank of the actor has a transport of each kind that is used, and makes the same calls.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing import reductions

from relax_cli.backends.meeting import choose_interface, open_store
from relax_cli.backends.megatron.weight_buckets import Bucket
from relax_cli.backends.ports import free_port
from relax_cli.backends.rollout.sglang.client import SglangError, declare
from relax_cli.backends.rollout.targets import WeightTarget, own_address
from relax_cli.errors import RunError

GROUP_BROKE = declare("sglang-update-group", "The process group of the actor and the servers did not form, or broke.")

TransportName = Literal["tensor", "distributed", "disk"]

Ask = Callable[[WeightTarget, str, Mapping[str, Any]], Callable[..., Any]]
"""A request to a path of a server, which is made when the result is called; `timeout=` replaces its deadline."""

LEAVING_SECONDS = 30.0
"""Deadline of what is said to servers after a failure."""
GRACE = 2.0
"""Seconds in which a failure that names a server may follow one that does not: a server that ends breaks both the
connection to it and the group that it was in."""
DEVICE_ARGUMENT = 6
"""Place of the device among the arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor`."""


class TensorTransport:
    """Handles of memory that servers on this node map: of the GPU they share with a rank, or of /dev/shm."""

    def __init__(self, sharing: Mapping[WeightTarget, Sequence[int]], rank: int, is_cuda: bool, ask: Ask) -> None:
        """`sharing`: the rank that shares memory with each rank of each server; the first also asks the server."""
        self.sharing = sharing
        self.rank = rank
        self.is_cuda = is_cuda
        self.ask = ask
        self._held: Tensor | None = None

    def pack(self, bucket: Bucket) -> dict[tuple[str, int], str]:
        """This rank's payloads by server and server rank, which all ranks have to know; each can be read once."""
        mine = [
            (t.address, i) for t, ranks in self.sharing.items() for i, rank in enumerate(ranks) if rank == self.rank
        ]
        if not mine:
            return {}
        self._held, places = flatten(bucket.tensors)
        return {receiver: serialise(self._held, places) for receiver in mine}

    def deliver(self, packs: Sequence[Mapping[tuple[str, int], str]], marks: Mapping[str, Any]) -> None:
        """Send a bucket from what `pack` returned on all ranks; returns when the servers have it.

        `marks` are fields of the request besides the weights. Raises RunError: a server did not take it.
        """
        payloads = {receiver: payload for pack in packs for receiver, payload in pack.items()}
        asked = []
        for target, ranks in self.sharing.items():
            if ranks[0] == self.rank:
                named = [payloads[target.address, i] for i in range(target.ranks)]
                body = {"serialized_named_tensors": named, "load_format": "flattened_bucket", **marks}
                asked.append(self.ask(target, "/update_weights_from_tensor", body))
        fail_fast(asked)

    def release(self) -> None:
        """Give up the memory of a bucket, once all ranks have delivered it."""
        self._held = None
        if self.is_cuda:
            # Memory that other processes mapped comes back only on request.
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def flatten(named: Sequence[tuple[str, Tensor]]) -> tuple[Tensor, list[SimpleNamespace]]:
    """All tensors' bytes `[N]` uint8 on their device, and where each is: name, shape, dtype, first byte, end, count."""
    # Wide types first, or a type could begin at a byte that it cannot be read from.
    ordered = sorted(named, key=lambda pair: -pair[1].element_size())
    parts = [tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in ordered]
    ends = itertools.accumulate(part.numel() for part in parts)
    places = [
        SimpleNamespace(
            name=name, shape=x.shape, dtype=x.dtype, start_idx=end - part.numel(), end_idx=end, numel=part.numel()
        )
        for (name, x), part, end in zip(ordered, parts, ends, strict=True)
    ]
    return torch.cat(parts), places


def serialise(flat: Tensor, places: list[SimpleNamespace]) -> str:
    """One server rank's payload, in base64; to be read once. `flat` has to live until the server has answered."""
    buffer = io.BytesIO()
    pickler = ForkingPickler(buffer)
    pickler.dispatch_table = {**pickler.dispatch_table, Tensor: _reduce_tensor}
    before = mp.get_sharing_strategy()  # type: ignore[no-untyped-call]
    # CPU tensors are shared as files of /dev/shm: file descriptors cannot go through HTTP.
    mp.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        pickler.dump({"flattened_tensor": flat, "metadata": places})
    finally:
        mp.set_sharing_strategy(before)  # type: ignore[no-untyped-call]
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _reduce_tensor(tensor: Tensor) -> Any:
    """As torch does, but a GPU is named by its UUID: both sides number the GPUs they see from 0."""
    rebuild, arguments = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    if not tensor.is_cuda or isinstance(arguments[DEVICE_ARGUMENT], str):
        return rebuild, arguments
    assert arguments[DEVICE_ARGUMENT] == tensor.device.index, "torch passes the device of a GPU tensor elsewhere"
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])


class DistributedTransport:
    """Broadcasts from rank 0 to all ranks of all servers, in a group that lives as long as one update."""

    def __init__(
        self, targets: Sequence[WeightTarget], backend: Literal["gloo", "nccl", "fake"], ask: Ask, timeout: float
    ) -> None:
        """`targets`: none on other ranks than 0; `timeout`: for the group to form, and for a broadcast to end."""
        self.targets = targets
        self.backend = backend
        self.ask = ask
        self.timeout = timeout
        self._name = ""
        self._group: dist.ProcessGroup | None = None

    def open(self, version: str) -> None:
        """Form the group. Raises RunError: a server did not join."""
        if not self.targets:
            return
        self._name = f"relax-{version}-{uuid.uuid4().hex[:8]}"
        address, port = own_address([target.address for target in self.targets]), free_port()
        ranks = 1 + sum(target.ranks for target in self.targets)
        joins, offset = [], 1
        for target in self.targets:
            meeting = {
                "master_address": address,
                "master_port": port,
                "rank_offset": offset,
                "world_size": ranks,
                "group_name": self._name,
                "backend": self.backend,
            }
            joins.append(self.ask(target, "/init_weights_update_group", meeting))
            offset += target.ranks
        self._group = self._together(partial(self._join, address, port, ranks), joins)

    def deliver(self, bucket: Bucket, marks: Mapping[str, Any]) -> None:
        """See `TensorTransport.deliver`."""
        group = self._group
        if group is None:
            return
        names, tensors = zip(*bucket.tensors, strict=True)
        expected = {
            "names": list(names),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": self._name,
            **marks,
        }
        asked = [self.ask(target, "/update_weights_from_distributed", expected) for target in self.targets]

        def broadcast() -> None:
            works = [dist.broadcast(t.contiguous(), 0, group=group, async_op=True) for t in tensors]
            for work in works:
                work.wait()

        # Servers answer when they have received.
        self._together(broadcast, asked)

    def close(self) -> None:
        """Both sides leave the group."""
        group, self._group = self._group, None
        if group is not None:
            self._together(partial(dist.destroy_process_group, group), self._farewells())

    def abandon(self) -> None:
        """The update failed, wherever. A server that leaves the group breaks the broadcast that waits for it."""
        group, self._group = self._group, None
        if self._name:
            for farewell in self._farewells():
                # It may be what failed, or may never have joined; the failure itself is raised elsewhere.
                with contextlib.suppress(SglangError):
                    farewell(timeout=LEAVING_SECONDS)
        if group is not None:
            # Not waited for: an unfinished broadcast blocks until its time is over.
            _started(partial(dist.destroy_process_group, group))

    def _farewells(self) -> list[Callable[..., Any]]:
        return [self.ask(t, "/destroy_weights_update_group", {"group_name": self._name}) for t in self.targets]

    def _join(self, address: str, port: int, ranks: int) -> dist.ProcessGroup:
        """Rank 0 of a group besides the role's own, once all ranks have joined.

        torch makes one default group per process, which is the role's. Servers build theirs with the function that is
        used here, and both sides have to agree on the keys of the store.
        """
        limit = timedelta(seconds=self.timeout)
        choose_interface(address)
        store = c10d.PrefixStore(self._name, open_store(address, port, ranks, host=True, timeout=limit))
        make: Any = c10d._new_process_group_helper
        group, _ = make(ranks, 0, [], dist.Backend(self.backend), store, group_name=self._name, timeout=limit)
        c10d._world.pg_group_ranks[group] = {i: i for i in range(ranks)}
        joined: dist.ProcessGroup = group
        return joined

    def _together(self, own: Callable[[], Any], asked: Sequence[Callable[..., Any]]) -> Any:
        """`own` and what servers are asked to do meanwhile.
        Raises RunError: a server refused or ended, or the group broke."""
        try:
            return fail_fast([own, *asked])[0]
        except RunError:
            raise
        except RuntimeError as error:
            problem = GROUP_BROKE(
                "the process group with the SGLang servers did not form, or broke",
                where=", ".join(target.address for target in self.targets),
                got=str(error).splitlines()[0][:300],
                expected="every server joins and receives",
                fix="look into the servers' logs; servers on other machines must reach this one: "
                "see NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, or use --update-weight-transport disk",
            )
            raise RunError(problem) from error


def fail_fast(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of blocking calls made at the same time, in order.

    Raises what a call raised, as soon as it did; a `RunError` where one follows shortly. Calls that still run are left
    behind: a broadcast without a receiver cannot be ended from here.
    """
    started = [_started(call) for call in calls]
    _, running = wait(started, return_when=FIRST_EXCEPTION)
    deadline = time.monotonic() + GRACE
    while errors := [error for future in started if future.done() and (error := future.exception())]:
        named = [error for error in errors if isinstance(error, RunError)]
        left = deadline - time.monotonic()
        if named or not running or left <= 0:
            raise (named or errors)[0]
        _, running = wait(running, left, return_when=FIRST_COMPLETED)
    return [future.result() for future in started]


def _started(call: Callable[[], Any]) -> Future[Any]:
    """The result of a call in a thread that does not keep the process alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="sglang-weights").start()
    return future
