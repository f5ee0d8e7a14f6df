"""Process groups of one role: tensor parallel inside, then context, data and pipeline. All state is Megatron's."""

from __future__ import annotations

import random
from collections.abc import Sequence
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

T = TypeVar("T")


@dataclass(frozen=True)
class Rank:
    """One worker of a role and where its ranks meet."""

    rank: int
    world_size: int
    master_addr: str = "127.0.0.1"
    master_port: int = 0


def initialize(
    rank: Rank,
    tensor_parallel: int,
    device: Device,
    seed: int,
    *,
    pipeline_parallel: int = 1,
    context_parallel: int = 1,
    expert_parallel: int = 1,
) -> None:
    """Join the ranks of this role. In one process that hosts several roles (world size 1) later calls check only.

    Raises:
        EnvironmentFault: megatron-core cannot run on this machine (see `cpu_support`).
    """
    if device.kind == "cpu":
        cpu_support.install()
    grid = tensor_parallel * pipeline_parallel * context_parallel
    assert rank.world_size % grid == 0, "ranks divide by the model-parallel sizes: checked before launch"
    if dist.is_initialized():
        here = (
            dist.get_rank(),
            dist.get_world_size(),
            mpu.get_tensor_model_parallel_world_size(),
            mpu.get_pipeline_model_parallel_world_size(),
            mpu.get_context_parallel_world_size(),
            mpu.get_expert_model_parallel_world_size(),
            dist.get_backend(),
        )
        sizes = (tensor_parallel, pipeline_parallel, context_parallel, expert_parallel)
        wanted = (rank.rank, rank.world_size, *sizes, device.backend)
        assert here == wanted, f"this process already is rank/ranks/TP/PP/CP/EP/backend {here}, not {wanted}"
        return
    alone = rank.world_size == 1 or device.backend == "fake"
    choose_interface("127.0.0.1" if alone else rank.master_addr)
    store = (
        HashStore() if alone else open_store(rank.master_addr, rank.master_port, rank.world_size, host=rank.rank == 0)
    )
    dist.init_process_group(device.backend, store=store, rank=rank.rank, world_size=rank.world_size)
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        context_parallel_size=context_parallel,
        expert_model_parallel_size=expert_parallel,
        # An expert is not split: the tokens of a tensor-parallel rank travel to it, which gloo can do as well.
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    seed_everything(seed, device)


def seed_everything(seed: int, device: Device) -> None:
    """Seed Python, numpy and torch alike on every rank, and on CUDA Megatron's per-region generators."""
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


def drop_scratch_memory() -> None:
    """Free the buffer that Megatron keeps on the device for gathering under sequence parallelism."""
    mpu.get_global_memory_buffer().buffer.clear()


def data_parallel_rank() -> int:
    """Which share of the samples this rank works on."""
    return int(mpu.get_data_parallel_rank())


def data_parallel_size() -> int:
    """Into how many shares the samples are split."""
    return int(mpu.get_data_parallel_world_size())


def data_parallel_group() -> dist.ProcessGroup:
    """Ranks that hold the same slice of the model and the same parts of other samples."""
    return mpu.get_data_parallel_group()  # type: ignore[no-any-return]


def tensor_parallel_rank() -> int:
    """Which slice of every layer this rank has."""
    return int(mpu.get_tensor_model_parallel_rank())


def tensor_parallel_size() -> int:
    """Into how many slices every layer is split."""
    return int(mpu.get_tensor_model_parallel_world_size())


def tensor_parallel_group() -> dist.ProcessGroup:
    """Ranks that share every layer and see the same samples."""
    return mpu.get_tensor_model_parallel_group()  # type: ignore[no-any-return]


def context_parallel_rank() -> int:
    """Which part of every sample this rank has."""
    return int(mpu.get_context_parallel_rank())


def context_parallel_size() -> int:
    """Into how many parts every sample is split."""
    return int(mpu.get_context_parallel_world_size())


def context_parallel_group() -> dist.ProcessGroup:
    """Ranks that hold the same slice of the model and the other parts of the same samples."""
    return mpu.get_context_parallel_group()  # type: ignore[no-any-return]


def expert_parallel_rank() -> int:
    """Which share of the experts this rank has."""
    return int(mpu.get_expert_model_parallel_rank())


def expert_parallel_size() -> int:
    """Into how many shares the experts are split."""
    return int(mpu.get_expert_model_parallel_world_size())


def expert_parallel_group() -> dist.ProcessGroup:
    """Ranks of a pipeline stage that share out the experts."""
    return mpu.get_expert_model_parallel_group()  # type: ignore[no-any-return]


def is_shared_out(parameter: torch.nn.Parameter) -> bool:
    """Whether it belongs to an expert that sees the tokens of other ranks than the rest of the model does."""
    return not getattr(parameter, "allreduce", True)


def replica_group(parameter: torch.nn.Parameter) -> dist.ProcessGroup:
    """Data- and context-parallel ranks that hold the same slice of a parameter."""
    every: dist.ProcessGroup = mpu.get_data_parallel_group(with_context_parallel=True)
    return mpu.get_expert_data_parallel_group() if is_shared_out(parameter) else every


def stage() -> int:
    """Which part of the layers this rank has."""
    return int(mpu.get_pipeline_model_parallel_rank())


def stages() -> int:
    """Into how many parts the layers are split."""
    return int(mpu.get_pipeline_model_parallel_world_size())


def is_last_stage() -> bool:
    """Whether the output layer, and so every loss, is on this rank."""
    return stage() == stages() - 1


def stage_group() -> dist.ProcessGroup:
    """Ranks that have the other layers for the same samples, by stage."""
    return mpu.get_pipeline_model_parallel_group()  # type: ignore[no-any-return]


def tensor_from_stage(tensor: torch.Tensor, owner: int) -> torch.Tensor:
    """Fill `tensor` with that of the stage `owner`."""
    dist.broadcast(tensor, dist.get_global_rank(stage_group(), owner), group=stage_group())
    return tensor


def from_last_stage(value: T) -> T:
    """What the last stage has for `value`, on every stage; without other ranks what this one has."""
    if stages() == 1 or dist.get_backend() == "fake":
        return value
    values = [value]
    dist.broadcast_object_list(values, dist.get_global_rank(stage_group(), stages() - 1), group=stage_group())
    return values[0]


def is_output_rank() -> bool:
    """One rank per share of the samples: it alone writes what all ranks of its model-parallel group computed."""
    return tensor_parallel_rank() == context_parallel_rank() == 0 and is_last_stage()


def sum_over_data_parallel(values: Sequence[float]) -> list[float]:
    """Element-wise sum over data-parallel ranks, in float64."""
    return _all_reduce(values, dist.ReduceOp.SUM)


def sum_over_all(values: Sequence[float]) -> list[float]:
    """Element-wise sum over all ranks of the role, in float64."""
    return _all_reduce(values, dist.ReduceOp.SUM, dist.group.WORLD)


def max_over_data_parallel(value: float) -> float:
    """Largest over data-parallel ranks."""
    return _all_reduce([value], dist.ReduceOp.MAX)[0]


def sum_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Sum metrics over data-parallel ranks; a rank without samples gives none."""
    if data_parallel_size() == 1:
        return metrics
    parts = gather(metrics, data_parallel_group())
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def gather_rows(rows: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The rows of all data-parallel ranks on each of them; every row is on one rank, its tensors on the CPU."""
    return {row: tensor for share in gather(rows, data_parallel_group()) for row, tensor in share.items()}


def passes_together(micro_batches: int) -> int:
    """How many forward passes each rank makes: its own micro-batches, or as many as any rank has, where in every
    layer tokens travel between ranks to their experts."""
    return micro_batches if expert_parallel_size() == 1 else int(max_over_data_parallel(micro_batches))


def _all_reduce(
    values: Sequence[float], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None
) -> list[float]:
    group = data_parallel_group() if group is None else group
    if group.size() == 1:
        return [float(value) for value in values]
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total, op=op, group=group)
    return total.tolist()
