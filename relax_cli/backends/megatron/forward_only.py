"""A model that only answers: the forward pass that every model shares, and the frozen policy of a reference role."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from relax_cli.backends.device import Device, Parking, free_unused_memory
from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.micro_batch import MicroBatch, ModelOutput, ResponseIndex
from relax_cli.backends.megatron.model import build_model
from relax_cli.config.schema import ParallelSection
from relax_cli.models.hf import HfWeights
from relax_cli.models.hybrid import read_any_spec


class FrozenModel:
    """A policy without gradients and optimizer, spread over the ranks that `parallel.initialize` joined."""

    def __init__(
        self, model_folder: Path, *, layout: ParallelSection, device: Device, seed: int, temperature: float = 1.0
    ) -> None:
        """Build from the Hugging Face folder `model_folder`; arguments as for `TrainableModel`.

        Raises:
            ConfigError: the folder is unreadable, unsupported, or does not divide by the tensor-parallel size.
            EnvironmentFault: TransformerEngine was requested and does not import.
        """
        ranks = layout.tensor_model_parallel_size
        assert ranks == parallel.tensor_parallel_size(), "parallel.initialize made other groups"
        self.device = device
        spec = read_any_spec(model_folder)
        self.model = build_model(
            "policy",
            model_folder,
            spec,
            device,
            layout=layout,
            temperature=temperature,
            value_head_std=0.0,
            seed=seed,
        )
        self.model.load_hf(HfWeights(model_folder), spec)
        self.model.requires_grad_(False)
        self._parking = Parking()

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[ModelOutput]:
        """Outputs of each micro-batch."""
        return forward_only(self.model, micro_batches, self.device)

    def sleep(self) -> None:
        """Leave the device's memory to others, where roles share it."""
        if self.device.shared_memory:
            self._parking.park([*self.model.parameters(), *self.model.buffers()])
            parallel.drop_scratch_memory()
            free_unused_memory(self.device)

    def wake(self) -> None:
        """Undo `sleep`."""
        self._parking.restore()


def forward_only(model: torch.nn.Module, micro_batches: Sequence[MicroBatch], device: Device) -> list[ModelOutput]:
    """Outputs of each micro-batch, without gradient."""
    with torch.no_grad():
        return [run_batch(model, batch.to(device.torch_device)) for batch in micro_batches]


def run_batch(model: torch.nn.Module, batch: MicroBatch) -> ModelOutput:
    """What the model says about the response tokens of a micro-batch that is on its device."""
    # The last token of the longest sample predicts nothing that was generated.
    length = int((batch.prompt_lens_B + batch.response_lens_B).max()) - 1
    output: ModelOutput = model(batch.tokens_BS[:, :length], ResponseIndex.of(batch))
    return output
