"""Adam behind Megatron's optimizer and scheduler, with clipping by torch's own functions.

Megatron's clipping checks for CUDA tensor types by name; torch's works on every device and returns the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from relax_cli.backends.megatron import checkpointing
from relax_cli.config.schema import OptimizerSection
from relax_cli.errors import ConfigError, Problem

GROUP_OPTIONS = ("max_lr", "min_lr", "betas", "eps", "fused")
"""Options of a parameter group that the configuration decides, also after a checkpoint was loaded."""


class Optimizer:
    """Adam, gradient clipping and learning-rate schedule of one model."""

    def __init__(
        self,
        model: DistributedDataParallel,
        section: OptimizerSection,
        lr: float,
        warmup_iters: int,
        decay_iters: int,
    ) -> None:
        if section.min_lr > lr:
            raise ConfigError(
                Problem(
                    id="min-lr-above-lr",
                    message="the learning rate would grow during decay",
                    fix="choose a --min-lr not above --lr (and --critic-lr)",
                    option="--min-lr",
                    got=str(section.min_lr),
                    expected=f"at most {lr}",
                )
            )
        self.clip_grad = section.clip_grad
        bf16 = next(model.parameters()).dtype == torch.bfloat16
        chained = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=lr,
                min_lr=section.min_lr,
                weight_decay=section.weight_decay,
                adam_beta1=section.adam_beta1,
                adam_beta2=section.adam_beta2,
                adam_eps=section.adam_eps,
                clip_grad=section.clip_grad,
                bf16=bf16,
                params_dtype=torch.bfloat16 if bf16 else torch.float32,
            ),
            [model],
            use_gloo_process_groups=False,
        )
        assert len(chained.chained_optimizers) == 1, "dense models have one optimizer"
        self.megatron = chained.chained_optimizers[0]
        self.adam: torch.optim.Optimizer = self.megatron.optimizer
        for group in self.adam.param_groups:
            group["fused"] = True
        self._create_state()
        self.scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0 if warmup_iters else lr,
            max_lr=lr,
            min_lr=section.min_lr,
            lr_warmup_steps=warmup_iters,
            lr_decay_steps=max(decay_iters, warmup_iters + 1),
            lr_decay_style=section.lr_decay_style,
            start_wd=section.weight_decay,
            end_wd=section.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )

    @torch.no_grad()
    def step(self) -> tuple[float, float, bool]:
        """Clip and update with the reduced gradients: norm before clipping, learning rate, whether it was skipped.

        A gradient that is not finite leaves parameters, moments and schedule as they are.
        """
        self.megatron.prepare_grads()
        norm = self._gradient_norm()
        if not math.isfinite(norm):
            self.zero_grad()
            return norm, self.lr, True
        if 0.0 < self.clip_grad < norm:
            torch.nn.utils.clip_grads_with_norm_(self.megatron.get_parameters(), self.clip_grad, torch.tensor(norm))
        # First the schedule, so that the first step of a warm-up already learns.
        self.scheduler.step(1)
        self.megatron.step_with_ready_grads()
        return norm, self.lr, False

    @property
    def lr(self) -> float:
        """Learning rate of the last step."""
        return float(self.adam.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.megatron.zero_grad()

    def reload_parameters(self) -> None:
        """Refresh fp32 master copies after the model's parameters were set from outside."""
        self.megatron.reload_model_params()

    def tensors(self) -> Iterator[Tensor]:
        """Everything that lives on the device: moments and, under bf16, master parameters."""
        for group in self.adam.param_groups:
            yield from group["params"]
        for state in self.adam.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0)

    def sharded_state(self, model_state: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
        """State to hand to `checkpointing`, in terms of the model's sharded state."""
        metadata = checkpointing.sharding_metadata()
        return {
            "optimizer": self.megatron.sharded_state_dict(model_state, is_loading, metadata=metadata),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state(self, loaded: dict[str, Any]) -> None:
        """Take over what `checkpointing.load` read."""
        own = [{name: group[name] for name in GROUP_OPTIONS} for group in self.adam.param_groups]
        saved = loaded["optimizer"]
        # Megatron leaves a common step of 0 out; under bf16 Adam's state is one level deeper.
        saved.get("optimizer", saved)["state"].setdefault("common_step", torch.zeros(()))
        self.megatron.load_state_dict(saved)
        for group, options in zip(self.adam.param_groups, own, strict=True):
            group.update(options)
        self.scheduler.num_steps = 0
        self.scheduler.load_state_dict(loaded["scheduler"])

    def _gradient_norm(self) -> float:
        grads = self.megatron.get_main_grads_for_grad_norm()
        squared = torch.nn.utils.get_total_norm(grads).square()
        dist.all_reduce(squared, group=self.megatron.get_grad_stats_parallel_group())
        return math.sqrt(squared.item())

    def _create_state(self) -> None:
        """Create Adam's state ahead of the first step: an actor that has only waited for its critic is saved too."""
        for group in self.adam.param_groups:
            for parameter in group["params"]:
                self.adam.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }
