"""Rules about the layers that are built: how they are split over ranks, and activations that are recomputed."""

from __future__ import annotations

import math

from relax_cli.config.names import nearest
from relax_cli.config.schema import BatchSection, CriticSection, ModelSection, ParallelSection
from relax_cli.models.spec import BRIDGE_FAMILIES, INDIVISIBLE
from relax_cli.preflight.inputs import RunInputs
from relax_cli.preflight.rules.registry import Finding, Found, largest_divisor, rule
from relax_cli.preflight.rules.resources import THEME

HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
"""Values of `config.json` that count heads, each on one tensor-parallel rank."""
RECOMPUTED_MODULES = ("core_attn", "mlp")
"""Parts of a dense layer that Megatron-core can recompute by themselves.

Not norms: without TransformerEngine that fails in Megatron-core (0.16, 0.19), and with it they are computed together
with the matrix product behind them.
"""


@rule("recompute-incomplete", THEME)
def recompute_incomplete(parallel: ParallelSection) -> Found:
    """`--recompute-granularity full` needs `--recompute-method` and `--recompute-num-layers`."""
    missing = ["--recompute-method uniform"] if parallel.recompute_method is None else []
    missing += ["--recompute-num-layers 1"] if parallel.recompute_num_layers is None else []
    if parallel.recompute_granularity == "full" and missing:
        yield Finding(
            "full recomputation needs to know which layers, and how many at a time",
            option=missing[0].split()[0],
            expected="uniform (chunks of layers) or block (the first layers), and a number",
            fix=" ".join(missing),
        )


@rule("recompute-module-unknown", THEME, option="--recompute-modules")
def recompute_module_unknown(parallel: ParallelSection) -> Found:
    """`--recompute-modules` takes parts of a dense layer: `core_attn` or `mlp`."""
    for name in parallel.recompute_modules:
        if name not in RECOMPUTED_MODULES:
            yield Finding(
                f"{name!r} is not a part of a layer that can be recomputed by itself",
                got=name,
                expected=", ".join(RECOMPUTED_MODULES),
                fix=f"--recompute-modules {nearest(name, RECOMPUTED_MODULES) or RECOMPUTED_MODULES[0]}",
            )


@rule("transformer-engine-needs-cuda", THEME, option="--transformer-impl")
def transformer_engine_needs_cuda(parallel: ParallelSection) -> Found:
    """`--transformer-impl transformer_engine` with `--device cpu`."""
    if parallel.transformer_impl == "transformer_engine" and parallel.device == "cpu":
        yield Finding(
            "TransformerEngine's layers do not run on a CPU",
            got="transformer_engine with --device cpu",
            expected="auto or local",
            fix="--transformer-impl auto, or --device cuda",
        )


@rule("recompute-layers", THEME, option="--recompute-num-layers", needs="files")
def recompute_layers(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """With `--recompute-method uniform`, `--recompute-num-layers` must divide the layers of the model, or of every
    pipeline stage."""
    size, layers = parallel.recompute_num_layers, inputs.model_count("num_hidden_layers")
    stages = parallel.stage_layers(layers) if layers else []
    layers = math.gcd(*stages) if sum(stages) == layers else None
    is_uniform = parallel.recompute_granularity == "full" and parallel.recompute_method == "uniform"
    # In a shorter last chunk, Megatron-core reads beyond the last layer.
    if is_uniform and size and layers and layers % size:
        yield Finding(
            f"the {' + '.join(map(str, stages))} layers of the model do not make whole chunks of {size}",
            got=str(size),
            expected=f"a divisor of {layers}",
            fix=f"--recompute-num-layers {largest_divisor(layers, size)}",
        )


@rule("pipeline-layers", THEME, option="--pipeline-model-parallel-size", needs="files")
def pipeline_layers(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """Pipeline stages have equally many layers; `--decoder-first-pipeline-num-layers` and
    `--decoder-last-pipeline-num-layers` set those of the first and the last stage. Together they are the model's."""
    layers, stages = inputs.model_count("num_hidden_layers"), parallel.pipeline_model_parallel_size
    counts = parallel.stage_layers(layers) if layers else []
    if layers and (sum(counts) != layers or min(counts) < 1):
        first = parallel.decoder_first_pipeline_num_layers
        rest, others = (layers, stages) if first is None else (layers - first, stages - 1)
        single = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
        drops = [f"drop --{name.replace('_', '-')}" for name in single if getattr(parallel, name) is not None]
        fix = ", and ".join([f"--pipeline-model-parallel-size {largest_divisor(layers, stages)}", *drops])
        if rest >= others:
            share = next(n for n in (-(-rest // others), rest // others) if rest - n * (others - 1) >= 1)
            fix = f"--decoder-last-pipeline-num-layers {rest - share * (others - 1)}"
        yield Finding(
            f"the model's {layers} layers cannot be shared out among {stages} pipeline stages",
            got=" + ".join(map(str, counts)),
            expected=f"stages that have {layers} layers together, and at least one each",
            fix=fix,
        )


@rule("bridge-pipeline", "Model", option="--pipeline-model-parallel-size", needs="files")
def bridge_pipeline(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """A model that goes through Megatron-Bridge with pipeline stages, which are not supported for it."""
    size = parallel.pipeline_model_parallel_size
    if size > 1 and inputs.model_config.get("model_type") in BRIDGE_FAMILIES:
        yield Finding(
            "models of Megatron-Bridge are trained without pipeline stages",
            got=str(size),
            expected="1",
            fix="--pipeline-model-parallel-size 1",
        )


@rule("bridge-context-parallel", "Model", option="--context-parallel-size", needs="files")
def bridge_context_parallel(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """A model that goes through Megatron-Bridge with context parallelism: its samples are not cut into pieces, and its
    linear attention would have to pass a state from rank to rank."""
    size = parallel.context_parallel_size
    if size > 1 and inputs.model_config.get("model_type") in BRIDGE_FAMILIES:
        yield Finding(
            "models of Megatron-Bridge are trained on whole samples",
            got=str(size),
            expected="1",
            fix="--context-parallel-size 1",
        )


@rule("heads-not-divisible", THEME, option="--tensor-model-parallel-size", needs="files")
def heads_not_divisible(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """Attention heads and key-value heads must be multiples of the tensor-parallel size."""
    size = parallel.tensor_model_parallel_size
    for name in HEADS:
        count = inputs.model_count(name)
        if count and count % size:
            yield Finding(
                f"{name} of the model ({count}) must be a multiple of --tensor-model-parallel-size",
                got=f"{count} heads over {size} ranks",
                expected=f"a divisor of {count}",
                fix=f"--tensor-model-parallel-size {largest_divisor(count, size)}",
            )


@rule(INDIVISIBLE, needs="files")
def tensor_parallel_indivisible(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """The MLP size must be a multiple of the tensor-parallel size."""
    size, ranks = inputs.model_count("intermediate_size"), parallel.tensor_model_parallel_size
    if size and size % ranks:
        yield Finding(
            f"the model's FFN size ({size}) must be a multiple of --tensor-model-parallel-size",
            got=str(ranks),
            expected=f"a divisor of {size}",
            fix=f"--tensor-model-parallel-size {largest_divisor(size, ranks)}",
        )


@rule("lora-transformer-engine", "Model", option="--transformer-impl")
def lora_transformer_engine(model: ModelSection, critic: CriticSection, parallel: ParallelSection) -> Found:
    """Low-rank adapters are in Megatron's local layers, not in those of TransformerEngine."""
    if (model.lora_rank or critic.critic_lora_rank) and parallel.transformer_impl == "transformer_engine":
        yield Finding(
            "TransformerEngine's layers have no low-rank adapters",
            got="transformer_engine",
            expected="auto or local, which are Megatron's own layers where there are adapters",
            fix="--transformer-impl auto",
        )


@rule("lora-bridge", "Model", option="--lora-rank", needs="files")
def lora_bridge(model: ModelSection, critic: CriticSection, inputs: RunInputs) -> Found:
    """A model that goes through Megatron-Bridge has no low-rank adapters; every weight of it is trained."""
    for option, rank in (("--lora-rank", model.lora_rank), ("--critic-lora-rank", critic.critic_lora_rank)):
        if rank and inputs.model_config.get("model_type") in BRIDGE_FAMILIES:
            yield Finding(
                "models of Megatron-Bridge are trained without low-rank adapters",
                option=option,
                got=str(rank),
                expected="0",
                fix=f"{option} 0",
            )


@rule("bridge-sequence-parallel", "Model", option="--sequence-parallel", needs="files")
def bridge_sequence_parallel(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """A model that goes through Megatron-Bridge with `--sequence-parallel`, which is not supported for it."""
    is_split = parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1
    if is_split and inputs.model_config.get("model_type") in BRIDGE_FAMILIES:
        yield SEQUENCE_PARALLEL_BRIDGE


@rule("bridge-log-probs-chunk", "Model", option="--log-probs-chunk-size", needs="files")
def bridge_log_probs_chunk(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """A model that goes through Megatron-Bridge with `--log-probs-chunk-size`: the bridge makes all logits at once."""
    if parallel.log_probs_chunk_size is not None and inputs.model_config.get("model_type") in BRIDGE_FAMILIES:
        yield Finding(
            "models of Megatron-Bridge make the logits of a micro-batch at once",
            got=str(parallel.log_probs_chunk_size),
            expected="unset",
            fix="drop --log-probs-chunk-size, and lower --micro-batch-size or --max-tokens-per-gpu",
        )


@rule("bridge-pack-sequences", "Model", option="--pack-sequences", needs="files")
def bridge_pack_sequences(batch: BatchSection, inputs: RunInputs) -> Found:
    """A model that goes through Megatron-Bridge with `--pack-sequences`, not built for it: its gated-delta layers
    take packed samples from megatron-core 0.19 on, and raise NotImplementedError before."""
    if batch.pack_sequences and inputs.model_config.get("model_type") in BRIDGE_FAMILIES:
        yield Finding(
            "models of Megatron-Bridge, with gated-delta layers, are trained on padded samples",
            got="on",
            expected="off",
            fix="--no-pack-sequences",
        )


SEQUENCE_PARALLEL_BRIDGE = Finding(
    "models of Megatron-Bridge are not trained with sequence parallelism",
    got="on",
    expected="off",
    fix="drop --sequence-parallel",
)
