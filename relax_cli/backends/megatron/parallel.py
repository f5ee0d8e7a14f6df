"""Process groups of one role: tensor parallel inside, then context, data and pipeline. All state is Megatron's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel as megatron_tp
from torch._C._distributed_c10d import HashStore

from relax_cli.backends.device import Device
from relax_cli.backends.meeting import choose_interface, open_store
from relax_cli.backends.megatron import cpu_support
from relax_cli.checkpoint.store import gather
from relax_cli.config.schema import ParallelSection

T = TypeVar("T")


@dataclass(frozen=True)
class Split:
    """One way in which the work of a role is split over ranks, by the function of Megatron that gives their group."""

    find_group: Callable[[], dist.ProcessGroup]

    @property
    def group(self) -> dist.ProcessGroup:
        """This rank and those that have the other parts."""
        return self.find_group()

    @property
    def rank(self) -> int:
        """Which part this rank has."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Into how many parts the work is split."""
        return dist.get_world_size(self.group)


TENSOR = Split(mpu.get_tensor_model_parallel_group)
"""Every layer, over ranks that see the same samples."""
STAGE = Split(mpu.get_pipeline_model_parallel_group)
"""The layers, over ranks that see the same samples."""
CONTEXT = Split(mpu.get_context_parallel_group)
"""Every sample, over ranks with the same slice of the model."""
EXPERT = Split(mpu.get_expert_model_parallel_group)
"""The experts, over ranks of a pipeline stage."""
DATA = Split(mpu.get_data_parallel_group)
"""The samples, over ranks with the same slice of the model and the same parts of other samples."""


def initialize(
    layout: ParallelSection,
    device: Device,
    seed: int,
    rank: int = 0,
    ranks: int = 1,
    address: str = "127.0.0.1",
    port: int = 0,
) -> None:
    """Join the ranks of this role, which meet at `address:port`. In one process that hosts several roles (one rank)
    later calls check only. Raises EnvironmentFault: megatron-core cannot run on this machine (see `cpu_support`)."""
    if device.kind == "cpu":
        cpu_support.install()
    assert ranks % layout.grid == 0, "ranks divide by the model-parallel sizes: checked before launch"
    sizes = {
        "tensor_model_parallel_size": layout.tensor_model_parallel_size,
        "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
        "context_parallel_size": layout.context_parallel_size,
        "expert_model_parallel_size": layout.expert_model_parallel_size,
    }
    if dist.is_initialized():
        of_splits = (split.size for split in (TENSOR, STAGE, CONTEXT, EXPERT))
        here = (dist.get_rank(), dist.get_world_size(), *of_splits, dist.get_backend())
        wanted = (rank, ranks, *sizes.values(), device.backend)
        assert here == wanted, f"this process already is rank/ranks/TP/PP/CP/EP/backend {here}, not {wanted}"
        return
    alone = ranks == 1 or device.backend == "fake"
    choose_interface("127.0.0.1" if alone else address)
    store = HashStore() if alone else open_store(address, port, ranks, host=rank == 0)
    dist.init_process_group(device.backend, store=store, rank=rank, world_size=ranks)
    mpu.initialize_model_parallel(
        **sizes,
        # An expert is not split: the tokens of a tensor-parallel rank travel to it, which gloo can do as well.
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    # Alike on every rank, but for Megatron's per-region generators on CUDA.
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if device.kind == "cuda":
        megatron_tp.model_parallel_cuda_manual_seed(seed)


def shutdown() -> None:
    """Leave the process groups; does nothing when none exist."""
    if dist.is_initialized():
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def is_shared_out(parameter: torch.nn.Parameter) -> bool:
    """Whether it belongs to an expert that sees the tokens of other ranks than the rest of the model does."""
    return not getattr(parameter, "allreduce", True)


def replica_group(parameter: torch.nn.Parameter) -> dist.ProcessGroup:
    """Data- and context-parallel ranks that hold the same slice of a parameter."""
    every: dist.ProcessGroup = mpu.get_data_parallel_group(with_context_parallel=True)
    return mpu.get_expert_data_parallel_group() if is_shared_out(parameter) else every


def is_last_stage() -> bool:
    """Whether the output layer, and so every loss, is on this rank."""
    return STAGE.rank == STAGE.size - 1


def from_last_stage(value: T) -> T:
    """What the last stage has for `value`, on every stage; without other ranks what this one has."""
    if STAGE.size == 1 or dist.get_backend() == "fake":
        return value
    values = [value]
    dist.broadcast_object_list(values, group=STAGE.group, group_src=STAGE.size - 1)
    return values[0]


def all_reduce(
    values: Sequence[float], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Element-wise over data-parallel ranks, or over those of `group`, in float64."""
    group = DATA.group if group is None else group
    if group.size() == 1:
        return [float(value) for value in values]
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total, op=op, group=group)
    return total.tolist()


def sum_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Sum metrics over data-parallel ranks; a rank without samples gives none."""
    if DATA.size == 1:
        return metrics
    parts = gather(metrics, DATA.group)
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def passes_together(micro_batches: int) -> int:
    """How many forward passes each rank makes: its own micro-batches, or as many as any rank has, where in every
    layer tokens travel between ranks to their experts."""
    return micro_batches if EXPERT.size == 1 else int(all_reduce([micro_batches], dist.ReduceOp.MAX)[0])
