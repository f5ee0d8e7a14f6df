"""A model in training: forward, optimizer steps, weights for the rollout engine, checkpoints, sleep.

Legend: `B` samples, `S` prompt + response, `T` response tokens. Every rank of a role makes the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import Tensor

from relax_cli.algorithms.schedule import Schedule
from relax_cli.backends.megatron import checkpointing, parallel, replicated
from relax_cli.backends.megatron.experts import Balance, other_routes
from relax_cli.backends.megatron.loaded import LoadedModel, idle_batch, run_batch, run_stages
from relax_cli.backends.megatron.micro_batch import Build, MicroBatch, ModelKind, ModelOutput, TrainStep
from relax_cli.backends.megatron.optimizer import Optimizer
from relax_cli.backends.megatron.random_state import capture, restore
from relax_cli.backends.megatron.weight_buckets import Bucket
from relax_cli.checkpoint.layout import FileEntry
from relax_cli.checkpoint.store import Group, is_first_rank
from relax_cli.models.spec import MOE_FAMILIES

LOAD_BALANCING = "load_balancing_loss"
EXPORT_BYTES = 256 << 20
"""Device memory that exporting takes besides the weights, unless one tensor needs more."""

__all__ = ["Build", "LossFunction", "MicroBatch", "ModelOutput", "TrainStep", "TrainableModel"]

LossFunction: TypeAlias = Callable[[ModelOutput, MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""Loss of a micro-batch and metrics, both already divided by the denominators of the whole global batch."""


class TrainableModel(LoadedModel):
    """A policy or a value model with its optimizer."""

    def __init__(self, kind: ModelKind, model_folder: Path, build: Build, schedule: Schedule) -> None:
        """Build from the Hugging Face folder `model_folder`; errors as for `LoadedModel`."""
        super().__init__(kind, model_folder, build)
        config = self.model.config
        self.balanced = self.spec.family in MOE_FAMILIES and build.layout.moe_aux_loss_coeff > 0
        self.ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), self.model)
        self.optimizer = Optimizer(self.ddp, schedule)
        self._begun: ModelOutput | None = None
        partly_used = replicated.partly_used(self.model, config)

        def sum_gradients(model: list[Any], _: Tensor | None, **more: Any) -> None:
            # Losses carry their denominators, so Megatron gets no number of tokens to divide by.
            finalize_model_grads(model, None, **more)
            replicated.sum_gradients(partly_used)

        config.finalize_model_grads_func = sum_gradients

    def begin(self, batch: MicroBatch, need_entropy_grad: bool = False) -> None:
        """Compute the forward pass of the next `train_step`'s first micro-batch, whose fields may not be known yet.
        Left to the step where stages have to take it together, or experts to be told what they see."""
        if parallel.STAGE.size == 1 and not self.balanced:
            self.model.entropy_grad = need_entropy_grad
            self._begun = run_batch(self.ddp, batch.to(self.device.torch_device))

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss_fn: LossFunction, need_entropy_grad: bool = False
    ) -> TrainStep:
        """One optimizer step on the sum of the losses of all micro-batches of all data-parallel ranks, however the
        samples are split. A rank may have none."""
        batches = [batch.to(self.device.torch_device) for batch in micro_batches]
        self.model.entropy_grad = need_entropy_grad
        self.ddp.zero_grad_buffer()
        self.optimizer.adam.zero_grad()
        metrics = self._forward_backward(batches, loss_fn)
        balance = metrics.pop(LOAD_BALANCING, None)
        grad_norm, lr, skipped = self.optimizer.step()
        replays = self.kind == "policy" and self.model.config.moe_enable_routing_replay
        return TrainStep(metrics, grad_norm, lr, skipped, balance, other_routes(self.model) if replays else None)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps taken so far, resumed ones included and skipped ones not."""
        return self.optimizer.num_steps

    def hf_buckets(self, limit: int) -> Iterator[Bucket]:
        """Policy: all parameters under their Hugging Face names, complete on every rank, `limit` bytes at a time. Every
        rank takes every bucket. Tensors are on the device in the type of training, and may be the live parameters."""
        assert self.kind == "policy", "a value model has no Hugging Face form"
        return self.model.hf_buckets(limit)

    def hf_state(self) -> dict[str, Tensor] | None:
        """Policy: all parameters under their Hugging Face names, complete, on the first rank; None elsewhere. Tensors
        are on the CPU in the type of training, and may be the live parameters where sleeping leaves those alone."""
        state: dict[str, Tensor] = {}
        for bucket in self.hf_buckets(EXPORT_BYTES):
            if is_first_rank():
                state |= {name: x.to("cpu", copy=self.device.shared_memory) for name, x in bucket.tensors}
        return state if is_first_rank() else None

    def value_head(self) -> Tensor:
        """Value model: a copy of the weights of its scalar head, on the CPU."""
        assert self.kind == "value", "a policy has no value head"
        head = self.model.output_layer.weight.detach().cpu().clone() if parallel.is_last_stage() else torch.empty(0)
        return parallel.from_last_stage(head)

    def prepare_save(self, common: dict[str, Any], *, copied: bool) -> Callable[[Path, Group], list[FileEntry]]:
        """See `checkpointing.prepare`; `common` are plain values, the same on all ranks."""
        return checkpointing.prepare({**self._sharded_state(), "common": common}, copied=copied)

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore what `prepare_save` took, also at another parallel layout; returns its `common`."""
        loaded = checkpointing.load(self._sharded_state(), folder)
        with checkpointing.taken_over_from(folder):
            checkpointing.load_model(self.model, loaded["model"])
            self.optimizer.load_state(loaded)
            return dict(loaded["common"])

    def load_weights(self, folder: Path) -> None:
        """Take the model's tensors alone from a checkpoint of any parallel layout; a value model keeps its new head.
        Raises ResumeError: the tensors are those of another model, or unreadable."""
        checkpointing.load_weights(self.model, folder, with_head=self.kind == "policy")
        self.optimizer.masters.refresh()

    random_state = staticmethod(capture)
    restore_random_state = staticmethod(restore)
    parallel_layout = staticmethod(checkpointing.parallel_layout)

    def sleep(self) -> None:
        """Leave the device's memory to others, where roles share it."""
        if self.device.shared_memory:
            self.optimizer.adam.zero_grad()
            buffers = [*self.ddp.buffers, *self.ddp.expert_parallel_buffers]
            self._park(self.optimizer.tensors(), scratch=[b.grad_data for b in buffers])

    def wake(self) -> None:
        """Undo `sleep`, and reset the peak of memory."""
        if self.device.kind == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device.torch_device)
        super().wake()

    def memory_metrics(self) -> dict[str, float]:
        """Most device memory since waking, in GB; nothing on a CPU, where the process's peak is not this model's."""
        if self.device.kind == "cpu":
            return {}
        return {"peak_memory_gb": torch.cuda.max_memory_allocated(self.device.torch_device) / 1e9}

    def _sharded_state(self) -> dict[str, Any]:
        model = checkpointing.sharded_model(self.model)
        return {"model": model, **self.optimizer.sharded_state(model)}

    def _forward_backward(self, batches: list[MicroBatch], loss_fn: LossFunction) -> dict[str, float]:
        passes = max(1, parallel.passes_together(len(batches)))
        idle = idle_batch(self.device.torch_device)
        balance = Balance(self.model, batches) if self.balanced else None

        def finish(output: ModelOutput, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return (output.main.sum() * 0.0, {}) if batch is idle else loss_fn(output, batch)

        def weighed() -> Iterator[MicroBatch]:
            for batch in [*batches, *[idle] * (passes - len(batches))]:
                if balance is not None:
                    balance.weigh(None if batch is idle else batch)
                yield batch

        begun, self._begun = self._begun, None
        reported = run_stages(self.ddp, weighed(), finish, passes=passes, forward_only=False, begun=begun)
        sums: dict[str, float] = {} if balance is None else {LOAD_BALANCING: balance.mean()}
        for metrics in reported:
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return parallel.from_last_stage(parallel.sum_metrics(sums))
