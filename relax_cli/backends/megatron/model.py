"""Policy and value model: Megatron's GPTModel whose output layer sees only the states that predict response tokens.

Legend: `B` samples, `S` prompt + response, `T` response tokens, `N` response tokens of a micro-batch, `H` hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from relax_cli.backends.device import Device
from relax_cli.backends.megatron import context, parallel
from relax_cli.backends.megatron.bridge import BridgedModel, recompute_settings
from relax_cli.backends.megatron.experts import (
    accept_routes,
    expert_settings,
    number_over_all_ranks,
    padding,
    with_routes,
)
from relax_cli.backends.megatron.heads import ValueHead, in_chunks, token_statistics
from relax_cli.backends.megatron.layers import PackedSamples, block_spec, layer_kind, local_name
from relax_cli.backends.megatron.lora import adapted_layers, freeze_all_but_adapters, is_adapter
from relax_cli.backends.megatron.micro_batch import Build, ModelKind, ModelOutput, ResponseIndex
from relax_cli.backends.megatron.weight_buckets import Bucket, hf_buckets
from relax_cli.config.schema import ParallelSection
from relax_cli.models.convert import EMBEDDING, EXPERTS, LAYERS, OUTPUT, padded_vocab, rank_tensors
from relax_cli.models.spec import BRIDGE_FAMILIES, MOE_FAMILIES, ModelSpec


def transformer_config(spec: ModelSpec, layout: ParallelSection, device: Device) -> TransformerConfig:
    """Megatron's description of `spec`, split and recomputed as `layout` says."""
    dtype = device.training_dtype
    several_stages = layout.pipeline_model_parallel_size > 1
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
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        num_layers_in_first_pipeline_stage=layout.decoder_first_pipeline_num_layers if several_stages else None,
        num_layers_in_last_pipeline_stage=layout.decoder_last_pipeline_num_layers if several_stages else None,
        pipeline_dtype=dtype,
        # Micro-batches differ in length, so stages also send shapes.
        variable_seq_lengths=several_stages,
        # What was sent is not needed here again, only its place in the graph.
        deallocate_pipeline_outputs=several_stages,
        # The other kinds refuse stages that send shapes, also where there are no experts.
        moe_token_dispatcher_type="alltoall",
        # One rank has nothing to split, and Megatron refuses it.
        sequence_parallel=layout.sequence_parallel and layout.tensor_model_parallel_size > 1,
        **recompute_settings(layout),
        **expert_settings(spec, layout),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=device.kind == "cpu",
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

    def __init__(self, spec: ModelSpec, build: Build, *, tied: bool) -> None:
        layout, device = build.layout, build.device
        config = transformer_config(spec, layout, device)
        is_local = build.lora is not None or spec.family in MOE_FAMILIES
        layers = "local" if is_local else layer_kind(layout.transformer_impl, device)
        counts, stage = layout.stage_layers(spec.num_layers), parallel.STAGE.rank
        here = range(sum(counts[:stage]), sum(counts[: stage + 1]))
        super().__init__(
            config,
            block_spec(spec, layers, build.lora, here),
            vocab_size=padded_vocab(spec, config.tensor_model_parallel_size),
            max_sequence_length=spec.max_positions,
            pre_process=stage == 0,
            post_process=parallel.is_last_stage(),
            # Rotary positions are applied inside the attention of the layer spec.
            position_embedding_type="none",
            share_embeddings_and_output_weights=tied,
        )
        self.spec = spec
        if config.moe_enable_routing_replay:
            accept_routes(self.decoder)

    def forward(self, tokens_BS: Tensor, response: ResponseIndex) -> ModelOutput | Tensor:
        """Right-padded token ids, or packed ones in one row, to what the model says about the response tokens; before
        the last stage, to hidden states."""
        ranks = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        # Positions and picked states are shared out evenly; `_postprocess` drops what is added here.
        tokens_BS = F.pad(tokens_BS, (0, -tokens_BS.size(1) % (ranks * context.pieces())))
        packed = None
        if response.lengths is not None:
            filled = tokens_BS.size(1) - sum(response.lengths)
            packed = PackedSamples.of(response.lengths, filled, tokens_BS.device)
        if context.pieces() > 1:
            places = context.own_places(packed.lengths if packed else tokens_BS.shape[1:], tokens_BS.device)
            response = response.within(places, tokens_BS.size(1))
            tokens_BS = tokens_BS[:, places]
        states_N = response.states_N
        if ranks > 1:
            states_N = F.pad(states_N, (0, -states_N.numel() % ranks if states_N.numel() else ranks))
        balanced = self.config.num_moe_experts and self.config.moe_aux_loss_coeff
        more: dict[str, Any] = {"padding_mask": padding(states_N, *tokens_BS.shape)} if balanced else {}
        block: dict[str, Any] = {"context": states_N}
        if response.routes is not None:
            block["routes"] = with_routes(response.routes, tokens_BS.size(1), more.pop("padding_mask", None))
        if packed is not None:
            more["packed_seq_params"] = packed
        output: ModelOutput | Tensor = super().forward(
            tokens_BS, None, None, labels=response, extra_block_kwargs=block, **more
        )
        return output

    def parameters_by_name(self) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters by the names that `models.convert` knows; those of adapters are left out."""
        named = ((self.global_name(local_name(name)), p) for name, p in self.named_parameters() if not is_adapter(name))
        return {number_over_all_ranks(name, self.spec): parameter for name, parameter in named}

    def global_name(self, name: str) -> str:
        """The name of a parameter, or of a part of a layer, where all layers are on one rank."""
        prefix, separator, rest = name.partition(LAYERS)
        if prefix or not separator:
            return name
        number, _, part = rest.partition(".")
        return f"{LAYERS}{self.decoder.layers[int(number)].layer_number - 1}.{part}"

    def hf_buckets(self, limit: int) -> Iterator[Bucket]:
        """See `TrainableModel.hf_buckets`; adapters are merged into the weights."""
        shards = {name: parameter.detach() for name, parameter in self.parameters_by_name().items()}
        layers = {self.global_name(name): layer for name, layer in adapted_layers(self).items()}

        def read(name: str) -> Tensor:
            return layers[name].merged_weight() if name in layers else shards[name]

        return hf_buckets(shards, self.spec, limit, read)

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Of a model with adapters only what is trained: the rest is in the Hugging Face folder."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, *args, **kwargs)
        frozen = {prefix + name for name, parameter in self.named_parameters() if not parameter.requires_grad}
        return {name: value for name, value in state.items() if name not in frozen}

    def load_hf(self, weights: Any) -> None:
        """Copy this rank's part of the Hugging Face tensors `weights` (a mapping) into the parameters."""
        spec, split, parameters = self.spec, parallel.TENSOR, self.parameters_by_name()
        left = set(parameters)
        # The last stage of a pipeline has a tied matrix a second time.
        tied = {EMBEDDING: OUTPUT} if spec.tied and self.head_from_folder else {}
        with torch.no_grad():
            for name, tensor in rank_tensors(weights, spec, split.size, split.rank, only=parameters):
                for wanted in {name, tied.get(name, name)} & left:
                    if wanted != OUTPUT or self.head_from_folder:
                        parameters[wanted].copy_(tensor)
                        left.remove(wanted)
        assert not left if self.head_from_folder else all(name.startswith("output_layer.") for name in left), left


class PolicyModel(_ResponseModel):
    """Log-probabilities and entropies of response tokens at a sampling temperature."""

    head_from_folder = True

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__(spec, build, tied=spec.tied)
        self.temperature = build.temperature
        self.chunk = build.layout.log_probs_chunk_size
        self.entropy_grad = False

    def setup_embeddings_and_output_layer(self) -> None:
        """See GPTModel. A tied matrix that two stages have is only marked: both load it, and sum its gradients."""
        if not self.share_embeddings_and_output_weights or self.pre_process == self.post_process:
            super().setup_embeddings_and_output_layer()
            return
        weight = self.shared_embedding_or_output_weight()
        weight.shared_embedding, weight.shared = True, self.post_process

    def _postprocess(self, hidden_states: Tensor, *, labels: ResponseIndex, **_: Any) -> ModelOutput | Tensor:
        if not self.post_process:
            return hidden_states
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None

        def statistics(states_NH: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
            logits_NV = self.output_layer(states_NH, weight=weight)[0]
            # A view that is divided in place costs a copy of its gradient.
            if logits_NV.size(0) > tokens_N.numel():
                logits_NV = logits_NV[: tokens_N.numel()]
            return token_statistics(logits_NV, tokens_N, self.spec.vocab_size, self.temperature, self.entropy_grad)

        states_NH, tokens_N = hidden_states.squeeze(1), labels.tokens_N
        if self.chunk is None or tokens_N.numel() <= self.chunk:
            log_probs_N, entropy_N = statistics(states_NH, tokens_N)
        else:
            ranks = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
            log_probs_N, entropy_N = in_chunks(statistics, states_NH, tokens_N, chunk=self.chunk, ranks=ranks)
        grids = (context.whole(labels.to_grid(values_N)) for values_N in (log_probs_N, entropy_N))
        return ModelOutput(*grids)


class ValueModel(_ResponseModel):
    """Values of the states before response tokens: the policy's backbone under a scalar head."""

    head_from_folder = False

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        # "Tied" keeps Megatron from allocating an output matrix that would be thrown away.
        super().__init__(spec, build, tied=True)
        self.share_embeddings_and_output_weights = False
        if self.post_process:
            self.output_layer = ValueHead(spec.hidden_size, build.value_head_std, build.seed)

    def setup_embeddings_and_output_layer(self) -> None:
        """Nothing: no other stage shares the embedding."""

    def _postprocess(self, hidden_states: Tensor, *, labels: ResponseIndex, **_: Any) -> ModelOutput | Tensor:
        if not self.post_process:
            return hidden_states
        states_NH = hidden_states.squeeze(1)
        if self.config.sequence_parallel:
            states_NH = gather_from_sequence_parallel_region(states_NH, tensor_parallel_output_grad=False)
            states_NH = states_NH[: labels.tokens_N.numel()]
        return ModelOutput(values_BT=context.whole(labels.to_grid(self.output_layer(states_NH)[0].squeeze(-1))))


def build_model(
    kind: ModelKind, folder: Path, spec: ModelSpec, build: Build
) -> PolicyModel | ValueModel | BridgedModel:
    """A model on its device, to be filled by `load_hf`, which reads the Hugging Face folder `folder`, or a checkpoint.
    Raises EnvironmentFault: TransformerEngine was requested, or Megatron-Bridge is needed, and does not import."""
    if spec.family in BRIDGE_FAMILIES:
        assert build.lora is None, "refused before the launch"
        return BridgedModel(kind, folder, spec, build)
    model: PolicyModel | ValueModel = PolicyModel(spec, build) if kind == "policy" else ValueModel(spec, build)
    if build.layout.tensor_model_parallel_size > 1:
        # Each rank has whole experts, and its own tokens: their gradients are summed up over the ranks, which Megatron
        # does only where experts are shared out.
        for name, parameter in model.named_parameters():
            if EXPERTS in name:
                parameter.allreduce = False
    if build.device.kind == "cuda":
        model.to(build.device.torch_device)
    if build.lora is not None:
        freeze_all_but_adapters(model, build.seed, model.global_name)
        if kind == "value" and model.post_process:
            model.output_layer.requires_grad_(True)
        if build.layout.recompute_granularity is not None and model.pre_process:
            # What is computed again gets a gradient only where its input does.
            model.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())
    return model
