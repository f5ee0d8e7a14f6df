"""A model that only answers: the forward pass that every model shares, and the frozen policy of a reference role."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from relax_cli.backends.device import Device, Parking
from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.model import build_model
from relax_cli.backends.megatron.records import MicroBatch, ModelOutput, ResponseIndex
from relax_cli.checkpoint.hf import HfWeights, read_spec


class FrozenModel:
    """A policy without gradients and optimizer, spread over the ranks that `parallel.initialize` joined."""

    def __init__(
        self, model_folder: Path, *, tensor_parallel: int, device: Device, seed: int, temperature: float = 1.0
    ) -> None:
        """Build from the Hugging Face folder `model_folder`; arguments as for `TrainableModel`.

        Raises:
            ConfigError: the folder is unreadable, unsupported, or does not divide by `tensor_parallel`.
        """
        assert tensor_parallel == parallel.tensor_parallel_size(), "parallel.initialize made other groups"
        self.device = device
        spec = read_spec(model_folder)
        self.model = build_model(
            "policy",
            spec,
            device,
            tensor_parallel=tensor_parallel,
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
        """Leave the device's memory to others; on a CPU there is nothing to leave."""
        if self.device.kind == "cuda":
            self._parking.park(list(self.model.parameters()), scratch=[])
            torch.cuda.empty_cache()

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
