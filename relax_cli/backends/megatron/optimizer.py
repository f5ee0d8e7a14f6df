"""Adam over fp32 masters, gradient clipping and the learning-rate schedule.

Megatron's optimizer classes are not used: they check for CUDA tensor types by name, update with another Adam where
TransformerEngine or Apex is installed, and leave parameters that stay in fp32 under bf16 (a value head) out of the
checkpoint's numbering.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from relax_cli.algorithms.schedule import learning_rate
from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.masters import MOMENTS, Masters
from relax_cli.config.schema import OptimizerSection


@dataclass(frozen=True)
class Schedule:
    """Adam's options, and the learning rate of every optimizer step of a run."""

    section: OptimizerSection
    lr: float
    """At the peak; the shape of the schedule comes from `section`."""
    warmup_iters: int
    """Optimizer steps of linear warm-up."""
    decay_iters: int
    """Optimizer steps of the run; the rate decays towards `min_lr` after them."""

    def rate(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0."""
        return learning_rate(
            step,
            peak=self.lr,
            floor=self.section.min_lr,
            warmup=self.warmup_iters,
            total=self.decay_iters,
            decay=self.section.lr_decay_style,
        )


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
        for group in groups:
            group["params"] = self.masters.values_of(group["params"])
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
