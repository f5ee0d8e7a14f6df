"""A model with its weights on its ranks, and the forward pass that every model shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from relax_cli.backends.device import Parking, free_unused_memory
from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.micro_batch import Build, MicroBatch, ModelKind, ModelOutput
from relax_cli.backends.megatron.model import build_model
from relax_cli.models.hf import HfWeights
from relax_cli.models.hybrid import read_any_spec
from relax_cli.models.spec import BRIDGE_FAMILIES


class LoadedModel:
    """A policy or a value model, spread over the ranks that `parallel.initialize` joined; it only answers."""

    def __init__(self, kind: ModelKind, model_folder: Path, build: Build) -> None:
        """Build from the Hugging Face folder `model_folder`.

        Raises:
            ConfigError: the folder is unreadable, unsupported, or does not divide by the tensor-parallel size.
            EnvironmentFault: TransformerEngine was requested and does not import.
        """
        ranks = build.layout.tensor_model_parallel_size
        assert ranks == parallel.tensor_parallel_size(), "parallel.initialize made other groups"
        self.kind = kind
        self.device = build.device
        self.spec = read_any_spec(model_folder)
        self.model = build_model(kind, model_folder, self.spec, build)
        self._read_weights(model_folder)
        self.packs = self.device.kind == "cpu" and self.spec.family not in BRIDGE_FAMILIES
        """Whether samples are packed when `--pack-sequences` does not say."""
        self._parking = Parking()

    def _read_weights(self, folder: Path) -> None:
        self.model.load_hf(HfWeights(folder), self.spec)

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[ModelOutput]:
        """Outputs of each micro-batch, without gradient."""
        idle = parallel.passes_together(len(micro_batches)) - len(micro_batches)
        batches = [*micro_batches, *[idle_batch(self.device.torch_device)] * idle]
        with torch.no_grad():
            outputs = [run_batch(self.model, batch.to(self.device.torch_device)) for batch in batches]
        return outputs[: len(micro_batches)]

    def sleep(self) -> None:
        """Leave the device's memory to others, where roles share it."""
        if self.device.shared_memory:
            self._park()

    def wake(self) -> None:
        """Undo `sleep`."""
        self._parking.restore()

    def _park(self, others: Iterable[Tensor] = (), scratch: Iterable[Tensor] = ()) -> None:
        self._parking.park([*self.model.parameters(), *self.model.buffers(), *others], scratch)
        parallel.drop_scratch_memory()
        free_unused_memory(self.device)


def run_batch(model: torch.nn.Module, batch: MicroBatch) -> ModelOutput:
    """What the model says about the response tokens of a micro-batch that is on its device."""
    output: ModelOutput = model(*batch.laid_out())
    return output


def idle_batch(device: torch.device) -> MicroBatch:
    """Something to run for a rank without samples: it must still join what the ranks do together."""
    one_B = torch.ones(1, dtype=torch.int64, device=device)
    return MicroBatch(torch.zeros(1, 2, dtype=torch.int64, device=device), one_B, one_B)
