"""Models that Megatron-Bridge builds and converts: the families of `BRIDGE_FAMILIES`, for which we have no converter.

Megatron-Bridge imports only with TransformerEngine, so this runs on CUDA. What it builds is a `GPTModel`, alone or
inside a model with a vision tower, which is left as it is. Before the output layer only the states that predict
response tokens reach it, as in `model.py`; a value model has a scalar head in the output layer's place.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from relax_cli.backends.device import Device
from relax_cli.backends.megatron.heads import ValueHead, token_statistics
from relax_cli.backends.megatron.micro_batch import Build, ModelKind, ModelOutput, ResponseIndex
from relax_cli.backends.megatron.weight_buckets import Bucket, as_buckets
from relax_cli.config.schema import ParallelSection
from relax_cli.errors import EnvironmentFault
from relax_cli.models.spec import ModelSpec
from relax_cli.preflight.rules.model import bridge_missing
from relax_cli.preflight.rules.registry import Finding


def auto_bridge() -> Any:
    """Megatron-Bridge's `AutoBridge`. Raises EnvironmentFault: the package, or something it needs, does not import."""
    try:
        return importlib.import_module("megatron.bridge").AutoBridge
    except (ImportError, OSError) as error:  # an OSError is a shared library of another CUDA version
        message = f"Megatron-Bridge does not import: {str(error).splitlines()[0]}"
        expected = "megatron-bridge and TransformerEngine for this CUDA version"
        found = Finding(message, "pip install 'relax-cli[bridge]'", expected=expected)
        raise EnvironmentFault(bridge_missing.problem(found)) from error


class BridgedModel(MegatronModule):  # type: ignore[misc]
    """A policy or value model around what Megatron-Bridge built; offers what the models of `model.py` do."""

    def __init__(self, kind: ModelKind, folder: Path, spec: ModelSpec, build: Build) -> None:
        """Build, and load the weights of the Hugging Face folder.
        Raises EnvironmentFault: Megatron-Bridge does not import."""
        device, layout = build.device, build.layout
        # Selecting response states does not know it.
        assert not layout.sequence_parallel or layout.tensor_model_parallel_size == 1, "refused before the launch"
        self.bridge = auto_bridge().from_hf_pretrained(str(folder), trust_remote_code=False)
        provider = self.bridge.to_megatron_provider(load_weights=False)
        configure(provider, layout, device)
        (inner,) = provider.provide_distributed_model(
            wrap_with_ddp=False,
            mixed_precision_wrapper=None,
            bf16=device.training_dtype == torch.bfloat16,
            use_cpu_initialization=device.kind == "cpu",
        )
        super().__init__(config=inner.config)
        self.kind = kind
        self.inner = inner.to(device.torch_device)
        self.temperature = build.temperature
        self.entropy_grad = False
        self.vocab_size = spec.vocab_size
        self._sizes: dict[str, int] = {}
        self.bridge.load_hf_weights([self.inner])
        language = {*self.language_model.parameters()}
        for parameter in self.inner.parameters():
            parameter.requires_grad_(parameter in language)
        if kind == "value":
            head = ValueHead(spec.hidden_size, build.value_head_std, build.seed)
            self.language_model.share_embeddings_and_output_weights = False
            self.language_model.output_layer = head.to(device.torch_device)
        # What Megatron's schedules and checkpoints ask a model for; the tensors keep the names they have by themselves.
        self.set_input_tensor = self.language_model.set_input_tensor
        self.sharded_state_dict, self.load_state_dict = self.inner.sharded_state_dict, self.inner.load_state_dict
        self.model_type = self.language_model.model_type
        self.share_embeddings_and_output_weights = self.language_model.share_embeddings_and_output_weights

    @property
    def language_model(self) -> Any:
        """The `GPTModel`, alone or inside a multimodal model."""
        return next(module for module in self.inner.modules() if isinstance(module, GPTModel))

    @property
    def output_layer(self) -> Any:
        """Where states become logits or values."""
        return self.language_model.output_layer

    def forward(self, tokens_BS: Tensor, response: ResponseIndex) -> ModelOutput:
        """Right-padded token ids to what the model says about the response tokens."""
        positions_BS = torch.arange(tokens_BS.size(1), device=tokens_BS.device).expand_as(tokens_BS)

        def pick_states(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden_SBH, *rest = args
            return hidden_SBH.flatten(0, 1).index_select(0, response.states_N).unsqueeze(1), *rest

        picking = self.output_layer.register_forward_pre_hook(pick_states)
        try:
            out_1NV = self.inner(input_ids=tokens_BS, position_ids=positions_BS, attention_mask=None)
        finally:
            picking.remove()
        out_NV = out_1NV.squeeze(0)
        if self.kind == "value":
            return ModelOutput(values_BT=response.to_grid(out_NV.squeeze(-1)))
        of_tokens = token_statistics(out_NV, response.tokens_N, self.vocab_size, self.temperature, self.entropy_grad)
        return ModelOutput(*map(response.to_grid, of_tokens))

    def hf_buckets(self, limit: int) -> Iterator[Bucket]:
        """The weights under their Hugging Face names, complete on every rank, `limit` bytes at a time."""
        if not self._sizes:
            # Only the bridge knows what it will write, and its sizes stay the same.
            self._sizes = {name: tensor.nbytes for name, tensor in self._exported()}
        return as_buckets(self._exported(), self._sizes, limit)

    def load_hf(self, weights: Any) -> None:
        """Nothing: the bridge has loaded the folder when this was built."""

    def _exported(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.bridge.export_hf_weights([self.inner], cpu=False, show_progress=False)


def configure(provider: Any, layout: ParallelSection, device: Device) -> None:
    """Tell a model provider of Megatron-Bridge how the model is split, stored and recomputed."""
    settings = {
        "tensor_model_parallel_size": layout.tensor_model_parallel_size,
        "pipeline_model_parallel_size": 1,
        "sequence_parallel": False,
        "params_dtype": device.training_dtype,
        "pipeline_dtype": device.training_dtype,
        "bf16": device.training_dtype == torch.bfloat16,
        **recompute_settings(layout),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Heads that predict further tokens would be trained by nothing.
        "mtp_num_layers": None,
        # Losses arrive divided by global denominators already, and gradients are summed into Megatron's buffers.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": 1,
    }
    for name, value in settings.items():
        assert hasattr(provider, name), f"this version of Megatron-Bridge has no {name}"
        setattr(provider, name, value)
    provider.finalize()


def recompute_settings(layout: ParallelSection) -> dict[str, Any]:
    """What Megatron is told about recomputing; options of the other granularity have no effect, and it refuses them."""
    full, selective = (layout.recompute_granularity == kind for kind in ("full", "selective"))
    experts = ["moe"] if "mlp" in layout.recompute_modules else []
    return {
        "recompute_granularity": layout.recompute_granularity,
        "recompute_method": layout.recompute_method if full else None,
        "recompute_num_layers": layout.recompute_num_layers if full else None,
        # Megatron's name of an MLP with experts is another.
        "recompute_modules": [*(layout.recompute_modules or ["core_attn"]), *experts] if selective else None,
    }
