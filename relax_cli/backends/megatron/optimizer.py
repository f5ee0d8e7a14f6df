"""Adam over fp32 masters, gradient clipping and the learning-rate schedule.

Parameters in fp32 are updated themselves. Parameters in lower precision have a master copy. With
`--optimizer-cpu-offload` every parameter has one, in host memory, together with its moments. With
`--use-distributed-optimizer` each data- or context-parallel rank has masters and moments of its share of the parameters
only, and sends the updated parameters to the others.

Megatron's optimizer classes are not used: they check for CUDA tensor types by name, update with another Adam where
TransformerEngine or Apex is installed, and leave parameters that stay in fp32 under bf16 (a value head) out of the
checkpoint's numbering.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from relax_cli.algorithms.schedule import Schedule
from relax_cli.backends.device import host_buffer
from relax_cli.backends.megatron import parallel

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Master:
    """One parameter that this rank updates."""

    index: int
    """Place among all parameters of the model."""
    parameter: torch.nn.Parameter
    values: Tensor
    """fp32; the parameter itself where that is fp32 and stays on its device."""
    host_grad: Tensor | None
    """Where the gradient is copied to for an update in host memory."""

    @property
    def is_copy(self) -> bool:
        """Whether the parameter has to be set after an update."""
        return self.values is not self.parameter

    @property
    def is_more_exact(self) -> bool:
        """Whether the master cannot be made from the parameter again."""
        return self.parameter.dtype != torch.float32


class Masters:
    """The masters of this rank, in the order of the parameters."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, on_host: bool, shared_out: bool) -> None:
        self.on_host = on_host
        self.parameters = list(parameters)
        self.shared_out = shared_out and parallel.DATA.size * parallel.CONTEXT.size > 1
        self.owners = _owners(self.parameters, shared_out=self.shared_out)
        self.held = [
            self._master(index, parameter)
            for index, (parameter, owner) in enumerate(zip(self.parameters, self.owners, strict=True))
            if owner is None or owner == dist.get_rank()
        ]

    def take_gradients(self) -> None:
        """Hand the reduced gradients to Adam."""
        for master in self.held:
            grad: Tensor = master.parameter.main_grad  # type: ignore[attr-defined]
            on_host = master.host_grad
            master.values.grad = grad if on_host is None else on_host.copy_(grad, non_blocking=True)
        self._wait()

    def set_parameters(self) -> None:
        """Round the updated masters to the parameters, on every rank."""
        for master in self.held:
            if master.is_copy:
                master.parameter.data.copy_(master.values, non_blocking=True)
        sent = [
            dist.broadcast(parameter.data, owner, group=parallel.replica_group(parameter), async_op=True)
            for parameter, owner in zip(self.parameters, self.owners, strict=True)
            if owner is not None
        ]
        for work in sent:
            work.wait()
        self._wait()

    def refresh(self) -> None:
        """Set the masters from parameters that were changed from outside."""
        for master in self.held:
            if master.is_copy:
                master.values.copy_(master.parameter.data)

    def sharded(self, model_state: dict[str, Any], adam: torch.optim.Optimizer) -> dict[str, Any]:
        """Moments and masters as `dist_checkpointing` wants them; keys follow the parameters' names, not the ranks."""
        names = get_param_id_to_sharded_param_map(model_state, iter(self.parameters))
        moments, masters = {}, {}
        for master in self.held:
            like = names[master.index]
            if self.shared_out:
                # Every rank writes what only it has, where otherwise the first one writes for all.
                like = replace(like, replica_id=(*like.replica_id[:-1], 0))
            moments[master.index] = {
                kind: make_sharded_optimizer_tensor(like, adam.state[master.values][kind], f"optimizer.state.{kind}")
                for kind in MOMENTS
            }
            if master.is_more_exact:
                prefix = "optimizer.state.fp32_param"
                masters[master.index] = make_sharded_optimizer_tensor(like, master.values, prefix)
        return {"state": moments, "masters": masters}

    def load(self, loaded: dict[str, Any], adam: torch.optim.Optimizer) -> None:
        """Take over what `sharded` requested; the parameters are loaded already."""
        for master in self.held:
            for kind in MOMENTS:
                adam.state[master.values][kind].copy_(loaded["state"][master.index][kind])
            # What was loaded may be the master itself: it must not be set from the parameter first.
            if master.is_more_exact:
                master.values.copy_(loaded["masters"][master.index])
            elif master.is_copy:
                master.values.copy_(master.parameter.data)

    def _master(self, index: int, parameter: torch.nn.Parameter) -> Master:
        if self.on_host:
            values = host_buffer(parameter.data.float()).copy_(parameter.data)
            return Master(index, parameter, values, host_buffer(parameter.data.float()))
        values = parameter if parameter.dtype == torch.float32 else parameter.detach().float()
        return Master(index, parameter, values, None)

    def _wait(self) -> None:
        """Copies between host and device are under way when they return."""
        if self.on_host and self.parameters[0].is_cuda:
            torch.cuda.synchronize(self.parameters[0].device)


def _owners(parameters: Sequence[torch.nn.Parameter], *, shared_out: bool) -> list[int | None]:
    """The rank that updates each parameter for all that have it; None where each of them does. The same on all these
    ranks, and about equally much for each."""
    owners: list[int | None] = [None] * len(parameters)
    # Shared-out experts are counted apart: a rank does not know those of others.
    loads: dict[tuple[bool, int], int] = defaultdict(int)
    for index in sorted(range(len(parameters)), key=lambda index: -parameters[index].numel()) if shared_out else ():
        kind = parallel.is_shared_out(parameters[index])
        ranks = dist.get_process_group_ranks(parallel.replica_group(parameters[index]))
        load, owner = min((loads[kind, rank], rank) for rank in ranks)
        owners[index] = owner
        loads[kind, owner] = load + parameters[index].numel()
    return owners


class Optimizer:
    """Adam, gradient clipping and learning-rate schedule of one model."""

    def __init__(self, model: DistributedDataParallel, schedule: Schedule) -> None:
        section = schedule.section
        self.model = model
        self.schedule = schedule
        self.clip_grad = section.clip_grad
        self.num_steps = 0
        """Steps taken so far, resumed ones included and skipped ones not."""
        groups = _parameter_groups(model, section.weight_decay)
        self.masters = Masters(
            [parameter for group in groups for parameter in group["params"]],
            on_host=section.optimizer_cpu_offload,
            shared_out=section.use_distributed_optimizer,
        )
        values = {id(master.parameter): master.values for master in self.masters.held}
        for group in groups:
            group["params"] = [values[id(parameter)] for parameter in group["params"] if id(parameter) in values]
        self.adam = torch.optim.AdamW(
            groups,
            lr=schedule.lr,
            betas=(section.adam_beta1, section.adam_beta2),
            eps=section.adam_eps,
            fused=True,
        )
        # Adam's state exists ahead of the first step: an actor that only waited for its critic is also saved.
        for master in self.masters.held:
            self.adam.state[master.values] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.values.device),
                **{kind: torch.zeros_like(master.values) for kind in MOMENTS},
            }
        self._set_rate(0)

    @torch.no_grad()
    def step(self) -> tuple[float, float, bool]:
        """Clip and update with the reduced gradients: norm before clipping, learning rate, whether it was skipped, as
        with a gradient that is not finite: parameters, moments and schedule then stay as they are."""
        norm = self._gradient_norm()
        if not math.isfinite(norm):
            self.adam.zero_grad()
            return norm, self.lr, True
        if 0.0 < self.clip_grad < norm:
            scale = (self.clip_grad / (torch.tensor(norm) + 1e-6)).clamp(max=1.0)
            for buffer in (*self.model.buffers, *self.model.expert_parallel_buffers):
                buffer.grad_data.mul_(scale.to(buffer.grad_data.device))
        self.masters.take_gradients()
        self._set_rate(self.num_steps)
        self.adam.step()
        self.num_steps += 1
        self.masters.set_parameters()
        return norm, self.lr, False

    @property
    def lr(self) -> float:
        """Learning rate of the last step."""
        return float(self.adam.param_groups[0]["lr"])

    def tensors(self) -> Iterator[Tensor]:
        """Everything that lives on the device: masters (in fp32 the parameters themselves) and moments."""
        if not self.masters.on_host:
            yield from (master.values for master in self.masters.held)
            for state in self.adam.state.values():
                yield from (state[kind] for kind in MOMENTS)

    def sharded_state(self, model_state: dict[str, Any]) -> dict[str, Any]:
        """State to hand to `checkpointing`, in terms of the model's sharded state."""
        state = self.masters.sharded(model_state, self.adam)
        state["state"]["common_step"] = torch.tensor(float(self.num_steps))
        scheduler = {
            "num_steps": self.num_steps,
            # Only for readers of the checkpoint, by the names of Megatron's scheduler.
            "max_lr": self.schedule.lr,
            "min_lr": self.schedule.section.min_lr,
            "lr_warmup_steps": self.schedule.warmup_iters,
            "lr_decay_steps": self.schedule.decay_iters,
            "lr_decay_style": self.schedule.section.lr_decay_style,
        }
        return {"optimizer": state, "scheduler": scheduler}

    def load_state(self, loaded: dict[str, Any]) -> None:
        """Take over what `checkpointing.load` read; options of the groups stay those of the configuration."""
        self.masters.load(loaded["optimizer"], self.adam)
        self.num_steps = int(loaded["scheduler"]["num_steps"])
        for values in self.adam.state.values():
            values["step"].fill_(self.num_steps)
        self._set_rate(max(0, self.num_steps - 1))

    def _set_rate(self, step: int) -> None:
        for group in self.adam.param_groups:
            group["lr"] = self.schedule.rate(step)

    def _gradient_norm(self) -> float:
        mine = [
            parameter
            for parameter in self.masters.parameters
            if param_is_not_shared(parameter)
            and param_is_not_tensor_parallel_duplicate(parameter, mpu.get_tensor_model_parallel_group())
        ]
        dense = [parameter for parameter in mine if not parallel.is_shared_out(parameter)]
        squared = self._squared_norm(dense, mpu.get_model_parallel_group())
        if self.model.config.num_moe_experts and parallel.EXPERT.size * parallel.TENSOR.size > 1:
            experts = [parameter for parameter in mine if parallel.is_shared_out(parameter)]
            squared += self._squared_norm(experts, mpu.get_expert_tensor_model_pipeline_parallel_group())
        return math.sqrt(squared)

    def _squared_norm(self, parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> float:
        """Of the gradients over all ranks of `group`."""
        norm = torch.nn.utils.get_total_norm([parameter.main_grad for parameter in parameters])  # type: ignore[attr-defined]
        # Of nothing, as of experts that are frozen, it is a 0 on the CPU, and NCCL takes none.
        squared = norm.to(self.masters.parameters[0].device).square()
        dist.all_reduce(squared, group=group)
        return float(squared)


def _parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """What is trained; norms and biases without weight decay, experts that are shared out after the rest."""
    kinds: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {
        (is_expert, is_vector): [] for is_expert in (False, True) for is_vector in (False, True)
    }
    for parameter in model.parameters():
        if parameter.requires_grad:
            kinds[parallel.is_shared_out(parameter), parameter.dim() == 1].append(parameter)
    return [
        {"params": found, "weight_decay": 0.0 if is_vector else weight_decay} for (_, is_vector), found in kinds.items()
    ]
