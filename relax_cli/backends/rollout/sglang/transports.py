"""The ways of weights to servers: shared memory of one node, a process group over nodes.

Every rank of the actor has a transport of each kind that is used, and makes the same calls.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from relax_cli.backends.device import Device
from relax_cli.backends.megatron.weight_buckets import Bucket
from relax_cli.backends.ports import free_port
from relax_cli.backends.rollout.sglang.client import SglangClient, SglangError
from relax_cli.backends.rollout.sglang.fail_fast import fail_fast
from relax_cli.backends.rollout.sglang.flattened_bucket import flatten, serialise
from relax_cli.backends.rollout.sglang.update_group import UpdateGroup, own_address
from relax_cli.backends.rollout.targets import WeightTarget
from relax_cli.errors import RunError, problem_kind

GROUP_BROKE = problem_kind(
    "sglang-update-group", "SGLang servers", "The process group of the actor and the servers did not form, or broke."
)

TransportName = Literal["tensor", "distributed", "disk"]

LEAVING_SECONDS = 30.0
"""Deadline of what is said to servers after a failure."""


class Transport:
    """One way for some of the servers; a step that it does not need does nothing."""

    def open(self, version: int) -> None:
        """Prepare for the weights `version`."""

    def pack(self, bucket: Bucket) -> Any:
        """What this rank has to tell the others about a bucket before it is delivered."""

    def deliver(self, bucket: Bucket, packs: Sequence[Any], marks: Mapping[str, Any]) -> None:
        """Send a bucket; returns when the servers have it.

        Args:
            packs: what `pack` returned, by rank.
            marks: fields of the request besides the weights.

        Raises:
            RunError: a server did not take it.
        """

    def release(self) -> None:
        """All ranks have delivered the bucket: its memory may be released."""

    def close(self) -> None:
        """The model is complete."""

    def abandon(self) -> None:
        """The update failed, wherever; raises nothing and waits for nothing long."""
        self.release()


class TensorTransport(Transport):
    """Handles of memory that servers on this node map: of the GPU they share with a rank, or of /dev/shm."""

    def __init__(
        self,
        sharing: Mapping[WeightTarget, Sequence[int]],
        rank: int,
        device: Device,
        clients: ClientOf,
        timeout: float,
    ) -> None:
        """
        Args:
            sharing: the actor rank that shares memory with each rank of each server; the first also asks the server.
        """
        self.sharing = sharing
        self.rank = rank
        self.device = device
        self.clients = clients
        self.timeout = timeout
        self._held: Tensor | None = None

    def pack(self, bucket: Bucket) -> dict[tuple[str, int], str]:
        """This rank's payloads by server and server rank; each payload can be read once."""
        mine = [
            (t.address, i) for t, ranks in self.sharing.items() for i, rank in enumerate(ranks) if rank == self.rank
        ]
        if not mine:
            return {}
        self._held, places = flatten(bucket.tensors)
        return {receiver: serialise(self._held, places) for receiver in mine}

    def deliver(self, bucket: Bucket, packs: Sequence[Any], marks: Mapping[str, Any]) -> None:
        """See `Transport`."""
        payloads = {receiver: payload for pack in packs for receiver, payload in pack.items()}
        fail_fast(
            [
                partial(
                    self.clients(target).request,
                    "POST",
                    "/update_weights_from_tensor",
                    {
                        "serialized_named_tensors": [payloads[target.address, i] for i in range(target.ranks)],
                        "load_format": "flattened_bucket",
                        **marks,
                    },
                    timeout=self.timeout,
                )
                for target, ranks in self.sharing.items()
                if ranks[0] == self.rank
            ]
        )

    def release(self) -> None:
        """See `Transport`."""
        self._held = None
        if self.device.kind == "cuda":
            # Memory that other processes mapped comes back only on request.
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


class DistributedTransport(Transport):
    """Broadcasts from rank 0 to all ranks of all servers, in a group that lives as long as one update."""

    def __init__(
        self, targets: Sequence[WeightTarget], rank: int, device: Device, clients: ClientOf, timeout: float
    ) -> None:
        self.targets = targets if rank == 0 else ()
        self.device = device
        self.clients = clients
        self.timeout = timeout
        self._name = ""
        self._group: UpdateGroup | None = None

    def open(self, version: int) -> None:
        """See `Transport`: rank 0 and the servers meet. Raises RunError: a server did not join."""
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
                "backend": self.device.backend,
            }
            joins.append(self._request(target, "/init_weights_update_group", meeting))
            offset += target.ranks
        meet = partial(UpdateGroup, self._name, address, port, ranks, self.device.backend, self.timeout)
        self._group = self._together(meet, joins)

    def deliver(self, bucket: Bucket, packs: Sequence[Any], marks: Mapping[str, Any]) -> None:
        """See `Transport`: servers answer when they have received, so requests and broadcasts run at the same time."""
        if self._group is None:
            return
        names, tensors = zip(*bucket.tensors, strict=True)
        expected = {
            "names": list(names),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": self._name,
            **marks,
        }
        asked = [self._request(target, "/update_weights_from_distributed", expected) for target in self.targets]
        self._together(partial(self._group.broadcast, tensors), asked)

    def close(self) -> None:
        """See `Transport`: both sides leave the group."""
        group, self._group = self._group, None
        if group is not None:
            self._together(group.leave, self._farewells(self.timeout))

    def abandon(self) -> None:
        """See `Transport`. A server that leaves the group breaks the broadcast that waits for it."""
        group, self._group = self._group, None
        if self._name:
            for farewell in self._farewells(LEAVING_SECONDS):
                # It may be what failed, or may never have joined; the failure itself is raised elsewhere.
                with contextlib.suppress(SglangError):
                    farewell()
        if group is not None:
            group.leave_behind()

    def _farewells(self, timeout: float) -> list[Callable[[], Any]]:
        name = {"group_name": self._name}
        return [self._request(t, "/destroy_weights_update_group", name, timeout) for t in self.targets]

    def _request(
        self, target: WeightTarget, path: str, payload: dict[str, Any], timeout: float | None = None
    ) -> Callable[[], Any]:
        return partial(self.clients(target).request, "POST", path, payload, timeout=timeout or self.timeout)

    def _together(self, own: Callable[[], Any], asked: Sequence[Callable[[], Any]]) -> Any:
        """`own` and what servers are asked to do meanwhile.
        Raises RunError: a server refused or ended, or the group broke."""
        try:
            return fail_fast([own, *asked])[0]
        except RuntimeError as error:
            if isinstance(error, RunError):
                raise
            raise group_broke([target.address for target in self.targets], error) from error


ClientOf = Callable[[WeightTarget], SglangClient]


def group_broke(addresses: Sequence[str], error: RuntimeError) -> RunError:
    """The error of a process group that did not form, or ended."""
    return RunError(
        GROUP_BROKE(
            "the process group with the SGLang servers did not form, or broke",
            where=", ".join(addresses),
            got=str(error).splitlines()[0][:300],
            expected="every server joins and receives",
            fix="look into the servers' logs; servers on other machines must reach this one: "
            "see NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, or use --update-weight-transport disk",
        )
    )
