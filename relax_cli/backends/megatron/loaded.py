"""A model with its weights on its ranks, and the forward pass that every model shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from relax_cli.backends.device import Parking
from relax_cli.backends.megatron import context, parallel
from relax_cli.backends.megatron.micro_batch import Build, MicroBatch, ModelKind, ModelOutput
from relax_cli.backends.megatron.model import build_model
from relax_cli.models.hf import HfWeights
from relax_cli.models.hybrid import read_any_spec
from relax_cli.models.spec import BRIDGE_FAMILIES

Report = TypeVar("Report")


class LoadedModel:
    """A policy or a value model, spread over the ranks that `parallel.initialize` joined; it only answers."""

    def __init__(self, kind: ModelKind, model_folder: Path, build: Build) -> None:
        """Build from the Hugging Face folder `model_folder`.
        Raises ConfigError, where that cannot be used, and EnvironmentFault: see `build_model`."""
        self.kind = kind
        self.device = build.device
        self.spec = read_any_spec(model_folder)
        self.model = build_model(kind, model_folder, self.spec, build)
        self._read_weights(model_folder)
        self.packs = self.device.kind == "cpu" and self.spec.family not in BRIDGE_FAMILIES
        """Whether samples are packed when `--pack-sequences` does not say."""
        self.parking = Parking()

    def _read_weights(self, folder: Path) -> None:
        self.model.load_hf(HfWeights(folder))

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[ModelOutput]:
        """Outputs of each micro-batch, without gradient."""
        idle = parallel.passes_together(len(micro_batches)) - len(micro_batches)
        batches = [*micro_batches, *[idle_batch(self.device.torch_device)] * idle]
        with torch.no_grad():
            moved = [batch.to(self.device.torch_device) for batch in batches]
            if parallel.STAGE.size == 1 or not moved:
                outputs = [run_batch(self.model, batch) for batch in moved]
            else:
                of_last = run_stages(
                    self.model, moved, lambda output, _: (output.main, output), passes=len(moved), forward_only=True
                )
                outputs = [self._on_every_stage(batch, of_last) for batch in moved]
        return outputs[: len(micro_batches)]

    def _on_every_stage(self, batch: MicroBatch, outputs: list[ModelOutput]) -> ModelOutput:
        """The first of `outputs`, which only the last stage has."""
        names = ("values_BT",) if self.kind == "value" else ("log_probs_BT", "entropy_BT")
        if parallel.is_last_stage():
            output = vars(outputs.pop(0))
            grids = torch.stack([output[name] for name in names])
        else:
            shape = batch.tokens_BS.size(0), int(batch.response_lens_B.max())
            grids = torch.empty(len(names), *shape, device=self.device.torch_device)
        dist.broadcast(grids, group=parallel.STAGE.group, group_src=parallel.STAGE.size - 1)
        return ModelOutput(**dict(zip(names, grids, strict=True)))

    def sleep(self) -> None:
        """Leave the device's memory to others, where roles share it."""
        if self.device.shared_memory:
            self._park()

    def wake(self) -> None:
        """Undo `sleep`."""
        self.parking.restore()

    def _park(self, others: Iterable[Tensor] = (), scratch: Iterable[Tensor] = ()) -> None:
        # Megatron keeps a buffer on the device for gathering under sequence parallelism.
        mpu.get_global_memory_buffer().buffer.clear()
        self.parking.park([*self.model.parameters(), *self.model.buffers(), *others], scratch)


def run_stages(
    model: torch.nn.Module,
    batches: Iterable[MicroBatch],
    finish: Callable[[ModelOutput, MicroBatch], tuple[Tensor, Report]],
    *,
    passes: int,
    forward_only: bool,
    begun: ModelOutput | None = None,
) -> list[Report]:
    """Micro-batches through all pipeline stages, and back; the reports of `finish` on the last stage.

    Args:
        batches: on the device; each is taken just before its forward pass.
        finish: turns what the last stage says into a loss and a report.
        passes: how many batches there are; at least one.
        begun: what the model said of the first batch, where its forward pass was computed before.
    """
    ready = [] if begun is None else [begun]

    def forward_step(iterator: Iterator[MicroBatch], _: Any) -> tuple[ModelOutput | Tensor, Any]:
        batch = next(iterator)

        def finished(output: ModelOutput) -> tuple[Tensor, Tensor, Report]:
            # Megatron also takes a number of tokens, which nothing is divided by.
            loss, report = finish(output, batch)
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), report

        return ready.pop() if ready else run_batch(model, batch), finished

    reports: list[Report] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=passes,
        seq_length=0,  # stages tell each other
        micro_batch_size=0,
        forward_only=forward_only,
    )
    return reports


def run_batch(model: torch.nn.Module, batch: MicroBatch) -> Any:
    """What the model says about the response tokens of a micro-batch that is on its device: a `ModelOutput`, or hidden
    states where a pipeline has later stages."""
    return model(*batch.laid_out(context.pieces()))


def idle_batch(device: torch.device) -> MicroBatch:
    """Something to run for a rank without samples: it must still join what the ranks do together."""
    one_B = torch.ones(1, dtype=torch.int64, device=device)
    return MicroBatch(torch.zeros(1, 2, dtype=torch.int64, device=device), one_B, one_B)
