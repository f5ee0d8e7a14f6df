"""Rules about mixtures of experts."""

from __future__ import annotations

from relax_cli.config.schema import CriticSection, ModelSection, ParallelSection
from relax_cli.models.spec import MOE_FAMILIES
from relax_cli.preflight.inputs import RunInputs
from relax_cli.preflight.rules.registry import Finding, Found, rule


@rule("moe-lora-targets", "Model", option="--lora-targets", needs="files")
def moe_lora_targets(model: ModelSection, critic: CriticSection, inputs: RunInputs) -> Found:
    """Low-rank adapters of a mixture of experts are in its attention (`linear_qkv`, `linear_proj`), not in experts."""
    in_mlps = [name for name in model.lora_targets if name.startswith("linear_fc")]
    if in_mlps and (model.lora_rank or critic.critic_lora_rank) and _has_experts(inputs):
        kept = [name for name in model.lora_targets if name not in in_mlps] or ["linear_qkv", "linear_proj"]
        yield Finding(
            "experts have no low-rank adapters",
            got=", ".join(in_mlps),
            expected="matrices of the attention: linear_qkv, linear_proj",
            fix=" ".join(f"--lora-targets {name}" for name in kept),
        )


@rule("moe-tensor-parallel", "Model", option="--tensor-model-parallel-size", needs="files")
def moe_tensor_parallel(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """A mixture of experts is trained without tensor parallelism."""
    if parallel.tensor_model_parallel_size > 1 and _has_experts(inputs):
        yield Finding(
            "mixtures of experts are not split by tensor parallelism",
            got=str(parallel.tensor_model_parallel_size),
            expected="1",
            fix="--tensor-model-parallel-size 1",
        )


@rule("moe-transformer-engine", "Model", option="--transformer-impl", needs="files")
def moe_transformer_engine(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """A mixture of experts is made of Megatron's local layers, not of TransformerEngine's."""
    if parallel.transformer_impl == "transformer_engine" and _has_experts(inputs):
        yield Finding(
            "mixtures of experts are not built from TransformerEngine's layers",
            got="transformer_engine",
            expected="auto or local, which are Megatron's own layers for these models",
            fix="--transformer-impl auto",
        )


def _has_experts(inputs: RunInputs) -> bool:
    return inputs.model_config.get("model_type") in MOE_FAMILIES
