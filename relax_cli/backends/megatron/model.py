"""Policy and value model: Megatron's GPTModel whose output layer sees only the states that predict response tokens.

Legend: `B` samples, `S` prompt + response, `T` response tokens, `N` response tokens of a micro-batch, `H` hidden.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from relax_cli.backends.device import Device
from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.layers import block_spec
from relax_cli.backends.megatron.log_probs import log_probs_and_entropy
from relax_cli.backends.megatron.records import ModelOutput, ResponseIndex
from relax_cli.checkpoint.convert import OUTPUT, hf_to_megatron
from relax_cli.checkpoint.hf import ModelSpec


def transformer_config(spec: ModelSpec, tensor_parallel: int, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's description of `spec`."""
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.rms_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        # The spec's own activation module, not TransformerEngine's: see `layers.SwiGlu`.
        use_te_activation_func=True,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        # Weights come from the model folder. Initialisation stays on, because it also marks parameters as sharded.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        # Sum over micro-batches and data-parallel ranks: losses arrive divided by global denominators already.
        calculate_per_token_loss=True,
    )


def _leave_as_is(weight: Tensor) -> Tensor:
    return weight


class _ResponseModel(GPTModel):  # type: ignore[misc]
    """A GPTModel that answers for the positions of a ResponseIndex; its last layer hands on `[N, 1, H]`."""

    head_from_folder: bool
    """Whether the output layer comes with the Hugging Face weights."""

    def __init__(self, spec: ModelSpec, config: TransformerConfig, *, tied: bool) -> None:
        super().__init__(
            config,
            block_spec(spec),
            vocab_size=spec.vocab_size,
            max_sequence_length=spec.max_positions,
            # Rotary positions are applied inside the attention of the layer spec.
            position_embedding_type="none",
            share_embeddings_and_output_weights=tied,
        )

    def forward(self, tokens_BS: Tensor, response: ResponseIndex) -> ModelOutput:
        """Right-padded token ids to what the model says about the response tokens."""
        output: ModelOutput = super().forward(
            tokens_BS, None, None, labels=response, extra_block_kwargs={"context": response.states_N}
        )
        return output

    def load_hf(self, weights: Any, spec: ModelSpec) -> None:
        """Copy this rank's part of the Hugging Face tensors `weights` (a mapping) into the parameters."""
        state = hf_to_megatron(weights, spec, parallel.tensor_parallel_size(), parallel.tensor_parallel_rank())
        if not self.head_from_folder:
            state.pop(OUTPUT, None)
        parameters = dict(self.named_parameters())
        left = parameters.keys() ^ state.keys()
        assert all(name.startswith("output_layer.") for name in left), left
        assert not (left and self.head_from_folder), left
        with torch.no_grad():
            for name, tensor in state.items():
                parameters[name].copy_(tensor)


class PolicyModel(_ResponseModel):
    """Log-probabilities and entropies of response tokens at a sampling temperature."""

    head_from_folder = True

    def __init__(self, spec: ModelSpec, config: TransformerConfig, temperature: float) -> None:
        super().__init__(spec, config, tied=spec.tied)
        self.temperature = temperature
        self.entropy_grad = False

    def _postprocess(self, hidden_states: Tensor, *, labels: ResponseIndex, **_: Any) -> ModelOutput:
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits_NV = self.output_layer(hidden_states.squeeze(1), weight=weight)[0].float()
        if self.temperature != 1.0:
            logits_NV = logits_NV.div_(self.temperature)
        log_probs_N, entropy_N = log_probs_and_entropy(logits_NV, labels.tokens_N, entropy_grad=self.entropy_grad)
        return ModelOutput(log_probs=labels.to_grid(log_probs_N), entropy=labels.to_grid(entropy_N))


class ValueModel(_ResponseModel):
    """Values of the states before response tokens: the policy's backbone under a scalar head.

    Under tensor parallelism every rank holds the whole head and sees the same states, so its gradients agree without
    communication, and so do those it hands down.
    """

    head_from_folder = False

    def __init__(self, spec: ModelSpec, config: TransformerConfig, head_std: float, seed: int) -> None:
        # "Tied" keeps Megatron from allocating an output matrix that would be thrown away.
        super().__init__(spec, config, tied=True)
        self.share_embeddings_and_output_weights = False
        self.output_layer = torch.nn.Linear(spec.hidden_size, 1, dtype=torch.float32)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            self.output_layer.weight.normal_(0.0, head_std, generator=generator)
            self.output_layer.bias.zero_()

    def _postprocess(self, hidden_states: Tensor, *, labels: ResponseIndex, **_: Any) -> ModelOutput:
        states_NH = hidden_states.squeeze(1)
        return ModelOutput(values=labels.to_grid(self.output_layer(states_NH.float()).squeeze(-1)))


def build_model(
    kind: Literal["policy", "value"],
    spec: ModelSpec,
    device: Device,
    *,
    tensor_parallel: int,
    temperature: float,
    value_head_std: float,
    seed: int,
) -> PolicyModel | ValueModel:
    """A model on `device` with uninitialised backbone weights, to be filled by `load_hf` or a checkpoint."""
    config = transformer_config(spec, tensor_parallel, device.training_dtype)
    model: PolicyModel | ValueModel
    if kind == "policy":
        model = PolicyModel(spec, config, temperature)
    else:
        model = ValueModel(spec, config, value_head_std, seed)
    model.to(device.torch_device)
    return model
