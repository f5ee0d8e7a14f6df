"""Brings one version of the policy's weights from the actor's ranks to every SGLang server.

    begin → for each bucket: gathered (by the caller), delivered, agreed on by all ranks → end → version read back

A failure on any rank ends the update on all of them, with an error that names the server and the bucket.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from safetensors import SafetensorError

from relax_cli.backends.device import Device
from relax_cli.backends.megatron.weight_buckets import Bucket
from relax_cli.backends.rollout.protocol import WeightsNotSent
from relax_cli.backends.rollout.sglang.client import CONTROL_SECONDS, SglangClient, SglangError, StatusFault, declare
from relax_cli.backends.rollout.sglang.replies import check_served, folder_of
from relax_cli.backends.rollout.sglang.transports import (
    GROUP_BROKE,
    LEAVING_SECONDS,
    DistributedTransport,
    TensorTransport,
    TransportName,
    fail_fast,
)
from relax_cli.backends.rollout.targets import WeightTarget, this_node
from relax_cli.checkpoint.store import gather
from relax_cli.errors import RelaxError, RunError
from relax_cli.models.headers import HEAD, ROTARY_TABLE, stored_tensors
from relax_cli.models.hf import write_hf
from relax_cli.models.hybrid import read_any_spec
from relax_cli.models.spec import FAMILIES

NOT_SENT = declare(
    "sglang-weights",
    "New weights did not reach a server. The message names the server and says how far they got; that server has a "
    "mixture of old and new weights until the next update is complete.",
)
NO_TRANSPORT = declare(
    "sglang-transport",
    "A server cannot be reached in the way that `--update-weight-transport` names: shared memory needs one machine and "
    "the same GPUs, and NCCL takes one rank per GPU.",
    option="--update-weight-transport",
)
OTHER_NAMES = declare(
    "sglang-weight-names",
    "The names of the actor's weights are not those of the model that a server has loaded. They are compared before "
    "anything is sent: a server answers 200 to a name it does not know, and keeps the old numbers of a missing one.",
)
DISK_FAILED = declare(
    "sglang-weights-disk",
    "With `--update-weight-transport disk` weights are written to the run folder first, and that failed.",
    option="--update-weight-transport",
)


@dataclass(frozen=True)
class SendOptions:
    """How weights are sent."""

    transport: Literal["auto", "tensor", "distributed", "disk"]
    bucket_bytes: int
    """Most bytes of a bucket, unless one tensor is larger."""
    timeout: float
    """Seconds in which a server has to take a bucket."""
    folder: Path
    """Where `disk` puts the weights."""
    template: Path
    """Model folder whose config and tokenizer files `disk` copies."""


class WeightSender:
    """Sends to the same servers again and again. One instance per rank; all ranks make the same calls."""

    def __init__(self, targets: Sequence[WeightTarget], device: Device, options: SendOptions) -> None:
        """Raises RunError: a server cannot be reached by the requested transport."""
        self.targets = tuple(targets)
        self._mine = self.targets if dist.get_rank() == 0 else ()
        """Those that this rank speaks to."""
        self.options = options
        self._clients = {target: SglangClient(target.address) for target in targets}
        nodes = gather(this_node())
        self.chosen = {target: choose_transport(target, options.transport, device, nodes) for target in targets}
        sharing = {t: sharing_ranks(t, len(nodes)) for t, way in self.chosen.items() if way == "tensor"}
        is_cuda = device.kind == "cuda"
        self._tensor = TensorTransport(sharing, dist.get_rank(), is_cuda, self._ask) if sharing else None
        self._group: DistributedTransport | None = None
        if "distributed" in self.chosen.values():
            spread = [target for target in self._mine if self.chosen[target] == "distributed"]
            self._group = DistributedTransport(spread, device.backend, self._ask, options.timeout)
        self._version = ""
        self._in_session: list[WeightTarget] = []
        self._compared = False
        self._remove_folder()  # of a run that was killed

    def send(self, buckets: Callable[[int], Iterator[Bucket]], version: int) -> None:
        """See `protocol.WeightSender`."""
        self._version = str(version)
        if "disk" in self.chosen.values():
            self._send_by_disk(self._with_compared_names(buckets))
        else:
            try:
                self._send_buckets(self._with_compared_names(buckets))
            except RunError:
                self._abandon()
                raise
        self._agreed("reading the version back", self._check_version)

    def _send_buckets(self, buckets: Iterator[Bucket]) -> None:
        self._agreed("beginning", self._begin)
        if self._group is not None:
            self._agreed("preparing", partial(self._group.open, self._version))
        for bucket in buckets:
            # A server that has a part of the weights must not claim the new version.
            marks = {"flush_cache": bucket.is_last} | ({"weight_version": self._version} if bucket.is_last else {})
            doing = f"bucket {bucket.number} of {bucket.count}"
            if self._tensor is not None:
                packs = self._agreed(doing, partial(self._tensor.pack, bucket))
                self._agreed(doing, partial(self._tensor.deliver, packs, marks))
                self._tensor.release()
            if self._group is not None:
                self._agreed(doing, partial(self._group.deliver, bucket, marks))
        if self._group is not None:
            self._agreed("closing", self._group.close)
        self._agreed("ending", self._end)

    def _send_by_disk(self, buckets: Iterator[Bucket]) -> None:
        """A model folder that servers read; needs no session. All of them go this way."""
        folder = self.options.folder / f"v{self._version}"
        body = {"model_path": str(folder), "load_format": "auto", "flush_cache": True, "weight_version": self._version}
        loads = [self._ask(target, "/update_weights_from_disk", body) for target in self._mine]
        try:
            self._agreed("writing", partial(self._write, buckets, folder))
            doing = f"loading {folder} (the server has to see this folder)"
            self._agreed(doing, partial(fail_fast, loads))
        finally:
            self._remove_folder()

    def _write(self, buckets: Iterator[Bucket], folder: Path) -> None:
        """Write the folder, on the first rank; it has its name only when it is complete."""
        partly = folder.with_name(f"{folder.name}.tmp")
        try:
            if dist.get_rank() == 0:
                write_hf(partly, (pair for bucket in buckets for pair in bucket.tensors), self.options.template)
                partly.rename(folder)
        except (OSError, SafetensorError) as error:
            fix = "make room in the run folder, or use another --update-weight-transport"
            what = f"weights for the SGLang servers cannot be written: {error}"
            raise RunError(DISK_FAILED(what, where=str(folder), fix=fix)) from error
        finally:
            for _ in buckets:
                pass  # Gather what is left of the weights: the other ranks wait for this one.

    def _remove_folder(self) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(self.options.folder, ignore_errors=True)

    def _with_compared_names(self, buckets: Callable[[int], Iterator[Bucket]]) -> Iterator[Bucket]:
        for bucket in buckets(self.options.bucket_bytes):
            if not self._compared:
                self._agreed("comparing names", partial(self._compare_names, bucket.names))
                self._compared = True
            yield bucket

    def _compare_names(self, ours: frozenset[str]) -> None:
        for target in self._mine:
            told = self._clients[target].request("GET", "/model_info", timeout=CONTROL_SECONDS)
            # Where this machine does not see the folder of the server, it is taken to be like ours.
            folder = folder_of(told) or self.options.template
            spec = read_any_spec(folder)
            names = stored_tensors(folder) if spec.family in FAMILIES else ()
            expected = {n for n in names if not (n == HEAD and spec.tied) and not n.endswith(ROTARY_TABLE)}
            unknown, missing = sorted(ours - expected), sorted(expected - ours)
            if expected and (unknown or missing):
                what = f"SGLang server {target.address} has loaded a model with other weights than the actor's"
                got = f"{len(unknown)} names unknown to it {unknown[:3]}, {len(missing)} missing {missing[:3]}"
                fix = "start the server with the folder of --hf-checkpoint as its --model-path"
                same = "the same names on both sides"
                raise RunError(OTHER_NAMES(what, where=str(folder), got=got, expected=same, fix=fix))

    def _begin(self) -> None:
        """Open a session on every server; one that does not know of sessions goes without."""
        for target in self._mine:
            begin = self._ask(target, "/begin_weight_update")
            try:
                begin()
            except StatusFault as fault:
                if fault.status == 404:
                    continue
                if fault.status != 400:
                    raise
                # A run that was killed may have left one open.
                self._ask(target, "/end_weight_update")()
                begin()
            self._in_session.append(target)

    def _end(self) -> None:
        while self._in_session:
            self._ask(self._in_session[-1], "/end_weight_update")()
            self._in_session.pop()

    def _abandon(self) -> None:
        """After a failure: leave groups and sessions, so that a server that lives can be sent weights again."""
        if self._tensor is not None:
            self._tensor.release()
        if self._group is not None:
            self._group.abandon()
        while self._in_session:
            # It may be what failed; the failure itself is raised.
            with contextlib.suppress(SglangError):
                self._ask(self._in_session.pop(), "/end_weight_update")(timeout=LEAVING_SECONDS)

    def _check_version(self) -> None:
        for target in self._mine:
            check_served(self._clients[target], self._version)

    def _ask(self, target: WeightTarget, path: str, body: Mapping[str, Any] | None = None) -> partial[Any]:
        """See `transports.Ask`."""
        return partial(self._clients[target].request, "POST", path, dict(body or {}), timeout=self.options.timeout)

    def _agreed(self, doing: str, action: Callable[[], Any]) -> list[Any]:
        """Do something on every rank; the results of all.
        Raises RunError: it failed on a rank; raised on all of them."""
        result, failure = None, None
        try:
            result = action()
        except WeightsNotSent:
            raise  # on every rank already
        except RelaxError as error:
            failure = error
        outcomes = gather((result, failure))
        for _, failed in outcomes:
            if failed is not None:
                cause = failed.problems[0]
                keeps_kind = cause.id in (GROUP_BROKE.id, DISK_FAILED.id, OTHER_NAMES.id)
                placed = replace(
                    cause,
                    id=cause.id if keeps_kind else NOT_SENT.id,
                    message=f"weights of version {self._version} were not sent ({doing}): {cause.message}",
                    expected=cause.expected or "all servers with the same weights",
                )
                raise WeightsNotSent(placed)
        return [value for value, _ in outcomes]


def choose_transport(
    target: WeightTarget, wanted: Literal["auto", "tensor", "distributed", "disk"], device: Device, nodes: Sequence[str]
) -> TransportName:
    """How weights reach a server; `nodes` has `this_node()` of every rank of the actor.
    Raises RunError: the requested transport cannot reach it."""
    if wanted == "disk":
        return "disk"
    is_cuda = device.kind == "cuda"
    same_node = all(nodes[rank] == target.node for rank in sharing_ranks(target, len(nodes)))
    shares_gpus = target.first_rank is not None and target.first_rank + target.ranks <= len(nodes)
    shares_memory = same_node and (shares_gpus or not is_cuda)
    reason = ""
    if wanted == "distributed" and is_cuda and target.first_rank is not None:
        reason = "it shares GPUs with the actor, and NCCL takes one rank per GPU"
    elif wanted == "tensor" and not shares_memory:
        cause = "nothing is known of its GPUs" if same_node else f"it runs on {target.node}"
        reason = f"it shares no memory with the actor on {nodes[0]}: {cause}"
    if reason:
        what = f"weights cannot go to SGLang server {target.address} by {wanted}: {reason}"
        fix = "drop --update-weight-transport, or use --update-weight-transport disk"
        where = f"http://{target.address}"
        raise RunError(NO_TRANSPORT(what, where=where, got=wanted, expected="auto, or disk", fix=fix))
    return "tensor" if shares_memory and wanted != "distributed" else "distributed"


def sharing_ranks(target: WeightTarget, actor_ranks: int) -> list[int]:
    """The actor rank that shares memory with each rank of a server; on a CPU any rank of the node does."""
    return [((target.first_rank or 0) + i) % actor_ranks for i in range(target.ranks)]
