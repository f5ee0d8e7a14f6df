"""The data plane: TransferQueue on Ray, and the same interface inside one process.

One partition per rollout, `train_<rollout_id>`; a sample's key is its row. Only this file knows TransferQueue.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from relax_cli.config.placement import STORAGE_UNITS
from relax_cli.engine.ray import queue_keys
from relax_cli.engine.ray.queue_keys import QueueKeys
from relax_cli.errors import RunError, problem_kind
from relax_cli.plugin.graph import ServiceGraph

QUEUE_TIMEOUT = problem_kind(
    "queue-timeout",
    "During a run",
    "A role waited for data of another one for longer than `--queue-timeout`.",
    option="--queue-timeout",
)


def partition(rollout_id: int) -> str:
    return f"train_{rollout_id}"


def missing_data(rollout_id: int, names: Sequence[str], graph: ServiceGraph, waited: float) -> RunError:
    """The error of a reader that waited in vain: what is missing and who should have written it."""
    writers = {name: role.name for role in graph.roles for name in role.writes}
    wanted = ", ".join(f"`{name}` (written by {writers.get(name, 'no role')})" for name in names)
    return RunError(
        QUEUE_TIMEOUT(
            f"the samples of step {rollout_id + 1} never became complete in the sample queue",
            where=f"partition {partition(rollout_id)}",
            got=f"nothing after {waited:.0f} s",
            expected=wanted,
            fix="look for the first error of the role named above in the run's logs/ folder; "
            "--queue-timeout SECONDS waits longer",
        )
    )


class LocalQueue:
    """Samples in a dictionary, for `--launcher local`."""

    def __init__(self, graph: ServiceGraph) -> None:
        self.graph = graph
        self.partitions: dict[int, dict[int, dict[str, Tensor]]] = {}

    def put(self, rollout_id: int, rows: Sequence[int], fields: dict[str, list[Tensor]]) -> None:
        samples = self.partitions.setdefault(rollout_id, {})
        for name, values in fields.items():
            for row, value in zip(rows, values, strict=True):
                samples.setdefault(row, {})[name] = value

    def get(self, rollout_id: int, rows: Sequence[int], names: Sequence[str]) -> dict[str, list[Tensor]]:
        """See `SampleQueue.get`; no other process writes meanwhile, so what is missing stays missing."""
        samples = self.partitions.get(rollout_id, {})
        absent = [name for name in names if any(name not in samples.get(row, {}) for row in rows)]
        if absent:
            raise missing_data(rollout_id, absent, self.graph, 0)
        return {name: [samples[row][name] for row in rows] for name in names}

    def clear(self, rollout_id: int) -> None:
        self.partitions.pop(rollout_id, None)


class TransferQueueStore:
    """The same over TransferQueue; every role process has one."""

    def __init__(self, graph: ServiceGraph, timeout: float, keys: QueueKeys) -> None:
        import transfer_queue

        queue_keys.protect_process(keys)
        transfer_queue.init()
        self.client = transfer_queue.get_client()
        self.batch_put = transfer_queue.kv_batch_put
        self.graph = graph
        self.timeout = timeout

    def put(self, rollout_id: int, rows: Sequence[int], fields: dict[str, list[Tensor]]) -> None:
        from tensordict import TensorDict

        columns = {
            # Scalars stacked, 1-D samples jagged.
            name: torch.nested.as_nested_tensor(values, layout=torch.jagged) if values[0].dim() else torch.stack(values)
            for name, values in fields.items()
        }
        self.batch_put(
            keys=[str(row) for row in rows],
            partition_id=partition(rollout_id),
            fields=TensorDict(columns, batch_size=len(rows)),
        )

    def get(self, rollout_id: int, rows: Sequence[int], names: Sequence[str]) -> dict[str, list[Tensor]]:
        keys = [str(row) for row in rows]
        started, pause = time.monotonic(), 0.01
        while True:
            found = self.client.kv_retrieve_meta(keys=keys, partition_id=partition(rollout_id), create=False)
            absent = [name for name in names if found.size < len(keys) or name not in found.field_names]
            if not absent:
                data = self.client.get_data(found.select_fields(list(names)))
                return {name: list(data[name].unbind(0)) for name in names}
            waited = time.monotonic() - started
            if waited > self.timeout:
                raise missing_data(rollout_id, absent, self.graph, waited)
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def clear(self, rollout_id: int) -> None:
        self.client.clear_partition(partition(rollout_id))


def open_transfer_queue(keys: QueueKeys) -> None:
    """Start controller and storage units; called once, by the process that will own them.
    Raises RunError: the cluster has the queue of another run, or a stranger could talk to this one."""
    import transfer_queue
    from omegaconf import OmegaConf

    queue_keys.refuse_second_queue()
    queue_keys.protect_process(keys)
    queue_keys.protect_actors(keys)
    # A cluster's head often has no CPU, and then no storage unit can be there.
    units = {"num_data_storage_units": STORAGE_UNITS, "required_node_resource": "CPU"}
    opened = transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": units}}))
    servers = [opened.controller.zmq_info, *opened.backend.SimpleStorage.zmq_info.values()]
    queue_keys.check_protected((server.ip, port) for server in servers for port in server.ports.values())
