"""Adam over fp32 masters, gradient clipping and the learning-rate schedule.

Megatron groups the parameters (no weight decay for norms and biases). Its optimizer classes are not used: they check
for CUDA tensor types by name, update with another Adam where TransformerEngine or Apex is installed, and leave
parameters that stay in fp32 under bf16 (a value head) out of the checkpoint's numbering.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from relax_cli.algorithms.schedule import learning_rate
from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.masters import Masters
from relax_cli.config.schema import OptimizerSection


class Schedule:
    """How many optimizer steps were taken, and the rate of each. Its state has the names of Megatron's scheduler."""

    def __init__(self, section: OptimizerSection, lr: float, warmup_iters: int, decay_iters: int) -> None:
        self.num_steps = 0
        self.section = section
        self.max_lr = lr
        self.warmup_iters = warmup_iters
        self.decay_iters = decay_iters

    def rate(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0."""
        return learning_rate(
            step,
            peak=self.max_lr,
            floor=self.section.min_lr,
            warmup=self.warmup_iters,
            total=self.decay_iters,
            decay=self.section.lr_decay_style,
        )

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: only `num_steps` is read again, the rest says where it came from."""
        return {
            "num_steps": self.num_steps,
            "max_lr": self.max_lr,
            "min_lr": self.section.min_lr,
            "lr_warmup_steps": self.warmup_iters,
            "lr_decay_steps": self.decay_iters,
            "lr_decay_style": self.section.lr_decay_style,
        }


class Optimizer:
    """Adam, gradient clipping and learning-rate schedule of one model."""

    def __init__(
        self, model: DistributedDataParallel, section: OptimizerSection, lr: float, warmup_iters: int, decay_iters: int
    ) -> None:
        self.model = model
        self.clip_grad = section.clip_grad
        groups = _parameter_groups(model, section, lr)
        self.masters = Masters(
            [parameter for group in groups for parameter in group["params"]],
            on_host=section.optimizer_cpu_offload,
            shared_out=section.use_distributed_optimizer,
        )
        self.adam = torch.optim.AdamW(
            [
                {
                    **group,
                    "params": self.masters.values_of(group["params"]),
                    "weight_decay": section.weight_decay * group["wd_mult"],
                }
                for group in groups
            ],
            lr=lr,
            betas=(section.adam_beta1, section.adam_beta2),
            eps=section.adam_eps,
            fused=True,
        )
        self._create_state()
        self.scheduler = Schedule(section, lr, warmup_iters, decay_iters)
        self._set_rate(0)

    @torch.no_grad()
    def step(self) -> tuple[float, float, bool]:
        """Clip and update with the reduced gradients: norm before clipping, learning rate, whether it was skipped.

        A gradient that is not finite leaves parameters, moments and schedule as they are.
        """
        norm = self._gradient_norm()
        if not math.isfinite(norm):
            self.zero_grad()
            return norm, self.lr, True
        if 0.0 < self.clip_grad < norm:
            self._scale_gradients(norm)
        self.masters.take_gradients()
        self._set_rate(self.scheduler.num_steps)
        self.adam.step()
        self.scheduler.num_steps += 1
        self.masters.set_parameters()
        return norm, self.lr, False

    @property
    def lr(self) -> float:
        """Learning rate of the last step."""
        return float(self.adam.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.masters.drop_gradients()

    def reload_parameters(self) -> None:
        """Refresh the masters after the model's parameters were set from outside."""
        self.masters.refresh()

    def tensors(self) -> Iterator[Tensor]:
        """Everything that lives on the device: masters (in fp32 the parameters themselves) and moments."""
        yield from self.masters.device_tensors()
        if not self.masters.on_host:
            for state in self.adam.state.values():
                yield from (value for value in state.values() if value.dim() > 0)

    def sharded_state(self, model_state: dict[str, Any]) -> dict[str, Any]:
        """State to hand to `checkpointing`, in terms of the model's sharded state."""
        state = self.masters.sharded(model_state, self.adam)
        state["state"]["common_step"] = self._steps_taken()
        return {"optimizer": state, "scheduler": self.scheduler.state_dict()}

    def load_state(self, loaded: dict[str, Any]) -> None:
        """Take over what `checkpointing.load` read; options of the groups stay those of the configuration."""
        state = loaded["optimizer"]
        self.masters.load(state, self.adam)
        # Checkpoints from before the first optimizer step may have no step.
        step = float(state["state"].get("common_step", 0.0))
        for values in self.adam.state.values():
            values["step"].fill_(step)
        self.scheduler.num_steps = int(loaded["scheduler"]["num_steps"])
        self._set_rate(max(0, self.scheduler.num_steps - 1))

    def _set_rate(self, step: int) -> None:
        for group in self.adam.param_groups:
            group["lr"] = self.scheduler.rate(step)

    def _steps_taken(self) -> Tensor:
        steps = {float(state["step"]) for state in self.adam.state.values()} or {0.0}
        assert len(steps) == 1, "all parameters are updated together"
        return torch.tensor(steps.pop())

    def _gradient_norm(self) -> float:
        mine = [
            parameter
            for parameter in self.masters.parameters
            if param_is_not_shared(parameter)
            and param_is_not_tensor_parallel_duplicate(parameter, mpu.get_tensor_model_parallel_group())
        ]
        dense = [parameter for parameter in mine if not parallel.is_shared_out(parameter)]
        squared = _squared_norm(dense, mpu.get_model_parallel_group())
        if self.model.config.num_moe_experts and parallel.EXPERT.size * parallel.TENSOR.size > 1:
            experts = [parameter for parameter in mine if parallel.is_shared_out(parameter)]
            squared += _squared_norm(experts, mpu.get_expert_tensor_model_pipeline_parallel_group())
        return math.sqrt(squared)

    def _scale_gradients(self, norm: float) -> None:
        scale = (self.clip_grad / (torch.tensor(norm) + 1e-6)).clamp(max=1.0)
        for buffer in (*self.model.buffers, *self.model.expert_parallel_buffers):
            buffer.grad_data.mul_(scale.to(buffer.grad_data.device))

    def _create_state(self) -> None:
        """Create Adam's state ahead of the first step: an actor that only waited for its critic is also saved."""
        for group in self.adam.param_groups:
            for values in group["params"]:
                self.adam.state[values] = {
                    "step": torch.zeros((), dtype=torch.float32, device=values.device),
                    "exp_avg": torch.zeros_like(values, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(values, memory_format=torch.preserve_format),
                }


def _squared_norm(parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> float:
    """Of the gradients over all ranks of `group`."""
    squared = torch.nn.utils.get_total_norm([parameter.main_grad for parameter in parameters]).square()  # type: ignore[attr-defined]
    dist.all_reduce(squared, group=group)
    return float(squared)


def _parameter_groups(model: DistributedDataParallel, section: OptimizerSection, lr: float) -> list[dict[str, Any]]:
    """Megatron's groups: parameters, their multipliers of weight decay and learning rate, and the rates' bounds."""
    chained = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=lr, min_lr=section.min_lr, weight_decay=section.weight_decay),
        [model],
        use_gloo_process_groups=False,
    )
    # One for the parameters that every rank has, and one for experts that are shared out.
    optimizers = [each.optimizer for each in chained.chained_optimizers]
    return [
        {name: value for name, value in group.items() if name not in theirs.defaults}
        for theirs in optimizers
        for group in theirs.param_groups
    ]
