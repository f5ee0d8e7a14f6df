"""Rules about mixtures of experts."""

from __future__ import annotations

import math

from relax_cli.config.placement import rollout_engine
from relax_cli.config.schema import Config, CriticSection, ModelSection, ParallelSection
from relax_cli.models.families import DEFAULTS, MOE_FAMILIES
from relax_cli.models.spec import MoeSpec
from relax_cli.preflight.inputs import RunInputs
from relax_cli.preflight.rules.registry import Finding, Found, largest_divisor, rule
from relax_cli.preflight.rules.resources import THEME, TRAINED_ROLES


@rule("moe-lora-targets", "Model", option="--lora-targets", needs="files")
def moe_lora_targets(model: ModelSection, critic: CriticSection, inputs: RunInputs) -> Found:
    """Low-rank adapters of a mixture of experts are in its attention (`linear_qkv`, `linear_proj`), not in experts."""
    in_mlps = [name for name in model.lora_targets if name.startswith("linear_fc")]
    if in_mlps and (model.lora_rank or critic.critic_lora_rank) and inputs.has_experts:
        kept = [name for name in model.lora_targets if name not in in_mlps] or ["linear_qkv", "linear_proj"]
        yield Finding(fix=" ".join(f"--lora-targets {name}" for name in kept), got=", ".join(in_mlps))


@rule("moe-tensor-parallel", "Model", option="--tensor-model-parallel-size", needs="files")
def moe_tensor_parallel(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """Tensor-parallel ranks of a mixture of experts need `--sequence-parallel`: each sends tokens of its own."""
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel and inputs.has_experts:
        yield Finding(fix="--sequence-parallel", expected="--sequence-parallel, or 1")


@rule("moe-transformer-engine", "Model", option="--transformer-impl", needs="files")
def moe_transformer_engine(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """A mixture of experts is made of Megatron's local layers, not of TransformerEngine's."""
    if parallel.transformer_impl == "transformer_engine" and inputs.has_experts:
        yield Finding(fix="--transformer-impl auto", expected="auto or local")


@rule("moe-sglang-dense-layers", "SGLang servers", option="--rollout-engine", needs="files")
def moe_sglang_dense_layers(config: Config, inputs: RunInputs) -> Found:
    """SGLang builds Qwen3-MoE with experts in every layer, whatever `mlp_only_layers` and `decoder_sparse_step` say."""
    dense = inputs.model.dense_layers if isinstance(inputs.model, MoeSpec) else ()
    if dense and rollout_engine(config) == "sglang":
        got = f"{len(dense)} layers without experts, the first is layer {dense[0]}"
        yield Finding(fix="--rollout-engine embedded, or a model with experts in every layer", got=got)


@rule("expert-parallel-size", THEME, option="--expert-model-parallel-size", needs="files")
def expert_parallel_size(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """`--expert-model-parallel-size` must divide the number of experts, and the ranks in each pipeline stage of every
    trained role, which share them out. A model without experts has 1."""
    size, experts, message = parallel.expert_model_parallel_size, 1, "the model has no experts to share out"
    if size == 1 or not inputs.model_config:
        return
    if inputs.has_experts:
        found = inputs.model_count("num_local_experts") or inputs.model_count("num_experts")
        experts, message = found or DEFAULTS[inputs.model_config["model_type"]]["num_experts"], ""
    ranks = {
        role: max(1, devices // parallel.pipeline_model_parallel_size)
        for role, (_, devices) in parallel.resource.items()
        if role in TRAINED_ROLES and devices > 0
    }
    common = math.gcd(experts, *ranks.values())
    if common % size:
        shares = [f"{experts} experts", *(f"{count} ranks of {role}" for role, count in ranks.items())]
        got = f"{size} for {', '.join(shares)}" if inputs.has_experts else None
        fix = f"--expert-model-parallel-size {largest_divisor(common, size)}"
        yield Finding(message, fix, got, f"a divisor of {common}")


@rule("moe-option-unused", "Options without effect", option="--moe-aux-loss-coeff", needs="files", severity="warning")
def moe_option_unused(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """`--moe-aux-loss-coeff` only works with a mixture of experts."""
    if parallel.moe_aux_loss_coeff and inputs.model_config and not inputs.has_experts:
        yield Finding(fix="drop --moe-aux-loss-coeff", expected="0 for this model")


@rule("router-replay-dense", "Model", option="--router-replay", needs="files")
def router_replay_dense(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """`--router-replay` needs a mixture of experts: no other model has routes."""
    if parallel.router_replay and inputs.model_config and not inputs.has_experts:
        family, expected = str(inputs.model_config.get("model_type")), " or ".join(sorted(MOE_FAMILIES))
        yield Finding(fix="--no-router-replay", got=family, expected=expected)


@rule("moe-balance-split", "Model", option="--moe-aux-loss-coeff")
def moe_balance_split(parallel: ParallelSection) -> Found:
    """`--moe-aux-loss-coeff` evens out the load of experts only where all layers and all tokens of a sample are on one
    rank: no rank counts the tokens of others."""
    sizes = {
        "tensor-parallel": parallel.tensor_model_parallel_size,
        "pipeline-parallel": parallel.pipeline_model_parallel_size,
        "context-parallel": parallel.context_parallel_size,
    }
    split = [f"{size} {kind} ranks" for kind, size in sizes.items() if size > 1]
    if parallel.moe_aux_loss_coeff and split:
        got = f"{parallel.moe_aux_loss_coeff} with {', '.join(split)}"
        message = "the load of experts is not evened out across ranks that share layers or samples"
        yield Finding(message, "--moe-aux-loss-coeff 0", got, "0, or one rank for each sample")
