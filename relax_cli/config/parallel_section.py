"""Options of roles, devices and parallelism."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from relax_cli.config.section import Section, option

Count = Annotated[int, Field(le=1 << 16)]
Ranks = Annotated[int, Field(ge=1, le=1 << 16)]


class ParallelSection(Section):
    """Roles, devices and parallelism."""

    resource: dict[str, tuple[Count, Count]] = Field(
        default_factory=lambda: {"actor": (1, 1), "rollout": (1, 1)},
        description='JSON {"role": [services, devices]}; on a CPU, devices are worker processes',
    )
    colocate: bool = option(False, "roles share devices and take turns")
    overlap_updates: bool = option(False, "train actor and critic at the same time (CPU only)")
    fully_async: bool = option(False, "generate while training (not supported yet)")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto: cuda if every role gets its GPUs, else cpu")
    launcher: Literal["ray", "local"] = option("ray", "Ray workers, or everything in one process for a debugger")
    offload: bool = option(False, "--offload-train and --offload-rollout")
    offload_train: bool = option(False, "move sleeping trainers to host memory")
    offload_rollout: bool = option(False, "release the GPU memory of a sleeping rollout engine")
    tensor_model_parallel_size: Ranks = option(1, "tensor-parallel size: ranks that share each layer")
    pipeline_model_parallel_size: Ranks = option(1, "pipeline-parallel size: ranks that share the layers")
    decoder_first_pipeline_num_layers: int | None = option(
        None, "layers of the first pipeline stage; an equal share when unset", ge=1
    )
    decoder_last_pipeline_num_layers: int | None = option(
        None, "layers of the last pipeline stage; an equal share when unset", ge=1
    )
    context_parallel_size: Ranks = option(1, "context-parallel size: ranks that share the positions of each sample")
    expert_model_parallel_size: Ranks = option(
        1, "expert-parallel size: ranks, of any other kind than stages, that share out the experts"
    )
    moe_aux_loss_coeff: float = option(
        0.0, "mixture of experts: weight of the loss that evens out the load of experts; 0: none", ge=0, le=1
    )
    moe_router_dtype: Literal["fp32", "fp64"] = option(
        "fp32", "mixture of experts: type in which tokens are matched with experts"
    )
    router_replay: bool = option(False, "mixture of experts: train with the experts that each token was generated with")
    sequence_parallel: bool = option(False, "shard norms and residuals along the sequence over tensor-parallel ranks")
    transformer_impl: Literal["auto", "local", "transformer_engine"] = option(
        "auto", "Megatron-core's layers; auto: TransformerEngine on CUDA if it imports, else local"
    )
    recompute_granularity: Literal["full", "selective"] | None = option(
        None, "activations to recompute in the backward pass; none when unset"
    )
    recompute_method: Literal["uniform", "block"] | None = option(
        None, "full recomputation: chunks of layers (uniform), or the first layers (block)"
    )
    recompute_num_layers: int | None = option(
        None, "full recomputation: layers per chunk, or how many first layers", ge=1
    )
    recompute_modules: tuple[str, ...] = option(
        (), "selective recomputation: parts of a layer (repeatable); core_attn when unset"
    )
    log_probs_chunk_size: int | None = option(
        None, "response tokens whose logits exist at a time, forward and backward; all when unset", ge=1
    )
    ray_num_cpus: int | None = option(
        None, "logical CPUs of a local Ray; as many as the roles need when unset", ge=1, le=100_000
    )
    cpu_matmul_precision: Literal["fp32", "bf16"] = option(
        "fp32", "factors of matrix products of training on a CPU; bf16 is faster and less exact, weights stay fp32"
    )
    threads_per_rank: int | None = option(
        None, "CPU threads per worker; cores / ranks of the role when unset", ge=1, le=1024
    )

    @property
    def grid(self) -> int:
        """Ranks that work on the same samples."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def tokens_of_rank(self, length: int) -> int:
        """How many tokens of a sample of `length` go through the layers of one rank: two equally long pieces."""
        ranks = self.context_parallel_size
        return length if ranks == 1 else 2 * -(-length // (2 * ranks))

    def stage_layers(self, layers: int) -> list[int]:
        """How many of a model's `layers` each pipeline stage has; less in all where they cannot be shared out."""
        first, last = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        stages = self.pipeline_model_parallel_size
        if stages == 1:
            return [layers]
        middle = stages - (first is not None) - (last is not None)
        rest = max(0, layers - (first or 0) - (last or 0))
        shares = [rest // middle] * middle if middle else []
        return [*([] if first is None else [first]), *shares, *([] if last is None else [last])]
