"""Rules about the layers that are built: how they are split over ranks, and activations that are recomputed."""

from __future__ import annotations

import math

from relax_cli.config.names import nearest
from relax_cli.config.schema import BatchSection, CriticSection, ModelSection, ParallelSection
from relax_cli.config.text import shortened
from relax_cli.models.spec import INDIVISIBLE
from relax_cli.preflight.inputs import RunInputs
from relax_cli.preflight.rules.registry import Finding, Found, largest_divisor, rule
from relax_cli.preflight.rules.resources import THEME

HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
"""Values of `config.json` that count heads, each on one tensor-parallel rank."""
RECOMPUTED_MODULES = ("core_attn", "mlp")
"""Parts of a dense layer that Megatron-core can recompute by themselves. Not norms: without TransformerEngine it fails
there (0.16, 0.19), and with it they are computed together with the matrix product behind them."""


@rule("recompute-incomplete", THEME)
def recompute_incomplete(parallel: ParallelSection) -> Found:
    """`--recompute-granularity full` needs `--recompute-method` and `--recompute-num-layers`."""
    missing = ["--recompute-method uniform"] if parallel.recompute_method is None else []
    missing += ["--recompute-num-layers 1"] if parallel.recompute_num_layers is None else []
    if parallel.recompute_granularity == "full" and missing:
        expected = "uniform (chunks of layers) or block (the first layers), and a number"
        yield Finding(fix=" ".join(missing), expected=expected, option=missing[0].split()[0])


@rule("recompute-module-unknown", THEME, option="--recompute-modules")
def recompute_module_unknown(parallel: ParallelSection) -> Found:
    """`--recompute-modules` takes parts of a dense layer: `core_attn` or `mlp`."""
    for name in parallel.recompute_modules:
        if name not in RECOMPUTED_MODULES:
            fix = f"--recompute-modules {nearest(name, RECOMPUTED_MODULES) or RECOMPUTED_MODULES[0]}"
            yield Finding(fix=fix, got=name, expected=", ".join(RECOMPUTED_MODULES))


@rule("transformer-engine-needs-cuda", THEME, option="--transformer-impl")
def transformer_engine_needs_cuda(parallel: ParallelSection) -> Found:
    """`--transformer-impl transformer_engine` with `--device cpu`."""
    if parallel.transformer_impl == "transformer_engine" and parallel.device == "cpu":
        fix = "--transformer-impl auto, or --device cuda"
        yield Finding("TransformerEngine's layers do not run on a CPU", fix, expected="auto or local")


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
        message = f"the {' + '.join(map(str, stages))} layers of the model do not make whole chunks of {size}"
        fix = f"--recompute-num-layers {largest_divisor(layers, size)}"
        yield Finding(message, fix, expected=f"a divisor of {layers}")


@rule("pipeline-layers", THEME, option="--pipeline-model-parallel-size", needs="files")
def pipeline_layers(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """Pipeline stages have equally many layers; `--decoder-first-pipeline-num-layers` and
    `--decoder-last-pipeline-num-layers` set those of the first and the last stage. Together they are the model's."""
    layers, stages = inputs.model_count("num_hidden_layers"), parallel.pipeline_model_parallel_size
    counts = parallel.stage_layers(layers) if layers else []
    if layers and (sum(counts) != layers or min(counts) < 1):
        first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
        rest, others = (layers, stages) if first is None else (layers - first, stages - 1)
        if rest >= others:
            share = next(n for n in (-(-rest // others), rest // others) if rest - n * (others - 1) >= 1)
            fix = f"--decoder-last-pipeline-num-layers {rest - share * (others - 1)}"
        else:
            fix = f"--pipeline-model-parallel-size {largest_divisor(layers, stages)}"
            fix += "" if first is None else ", and drop --decoder-first-pipeline-num-layers"
            fix += "" if last is None else ", and drop --decoder-last-pipeline-num-layers"
        message = f"the model's {layers} layers cannot be shared out among {stages} pipeline stages"
        expected = f"stages that have {layers} layers together, and at least one each"
        yield Finding(message, fix, shortened(" + ".join(map(str, counts)), 80), expected)


@rule("bridge-pipeline", "Model", option="--pipeline-model-parallel-size", needs="files")
def bridge_pipeline(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """A model that goes through Megatron-Bridge with pipeline stages, which are not supported for it."""
    if parallel.pipeline_model_parallel_size > 1 and inputs.needs_bridge:
        message = "models of Megatron-Bridge are trained without pipeline stages"
        yield Finding(message, "--pipeline-model-parallel-size 1", expected="1")


@rule("bridge-context-parallel", "Model", option="--context-parallel-size", needs="files")
def bridge_context_parallel(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """A model that goes through Megatron-Bridge with context parallelism: its samples are not cut into pieces, and its
    linear attention would have to pass a state from rank to rank."""
    if parallel.context_parallel_size > 1 and inputs.needs_bridge:
        message = "models of Megatron-Bridge are trained on whole samples"
        yield Finding(message, "--context-parallel-size 1", expected="1")


@rule("heads-not-divisible", THEME, option="--tensor-model-parallel-size", needs="files")
def heads_not_divisible(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """Attention heads and key-value heads must be multiples of the tensor-parallel size."""
    size = parallel.tensor_model_parallel_size
    for name in HEADS:
        count = inputs.model_count(name)
        if count and count % size:
            message = f"{name} of the model ({count}) must be a multiple of --tensor-model-parallel-size"
            fix = f"--tensor-model-parallel-size {largest_divisor(count, size)}"
            yield Finding(message, fix, expected=f"a divisor of {count}")


@rule(INDIVISIBLE, needs="files")
def tensor_parallel_indivisible(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """The MLP size must be a multiple of the tensor-parallel size."""
    size, ranks = inputs.model_count("intermediate_size"), parallel.tensor_model_parallel_size
    if size and size % ranks:
        message = f"the model's FFN size ({size}) must be a multiple of --tensor-model-parallel-size"
        fix = f"--tensor-model-parallel-size {largest_divisor(size, ranks)}"
        yield Finding(message, fix, expected=f"a divisor of {size}")


@rule("lora-transformer-engine", "Model", option="--transformer-impl")
def lora_transformer_engine(model: ModelSection, critic: CriticSection, parallel: ParallelSection) -> Found:
    """Low-rank adapters are in Megatron's local layers, not in those of TransformerEngine."""
    if (model.lora_rank or critic.critic_lora_rank) and parallel.transformer_impl == "transformer_engine":
        yield Finding(fix="--transformer-impl auto", expected="auto or local")


@rule("lora-bridge", "Model", option="--lora-rank", needs="files")
def lora_bridge(model: ModelSection, critic: CriticSection, inputs: RunInputs) -> Found:
    """A model that goes through Megatron-Bridge has no low-rank adapters; every weight of it is trained."""
    for option, rank in (("--lora-rank", model.lora_rank), ("--critic-lora-rank", critic.critic_lora_rank)):
        if rank and inputs.needs_bridge:
            message = "models of Megatron-Bridge are trained without low-rank adapters"
            yield Finding(message, f"{option} 0", expected="0", option=option)


@rule("bridge-sequence-parallel", "Model", option="--sequence-parallel", needs="files")
def bridge_sequence_parallel(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """A model that goes through Megatron-Bridge with `--sequence-parallel`, which is not supported for it."""
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1 and inputs.needs_bridge:
        message = "models of Megatron-Bridge are not trained with sequence parallelism"
        yield Finding(message, "drop --sequence-parallel", "on", "off")


@rule("bridge-log-probs-chunk", "Model", option="--log-probs-chunk-size", needs="files")
def bridge_log_probs_chunk(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """A model that goes through Megatron-Bridge with `--log-probs-chunk-size`: the bridge makes all logits at once."""
    if parallel.log_probs_chunk_size is not None and inputs.needs_bridge:
        fix = "drop --log-probs-chunk-size, and lower --micro-batch-size or --max-tokens-per-gpu"
        yield Finding("models of Megatron-Bridge make the logits of a micro-batch at once", fix)


@rule("bridge-pack-sequences", "Model", option="--pack-sequences", needs="files")
def bridge_pack_sequences(batch: BatchSection, inputs: RunInputs) -> Found:
    """A model that goes through Megatron-Bridge with `--pack-sequences`, not built for it: its gated-delta layers
    take packed samples from megatron-core 0.19 on, and raise NotImplementedError before."""
    if batch.pack_sequences and inputs.needs_bridge:
        message = "models of Megatron-Bridge, with gated-delta layers, are trained on padded samples"
        yield Finding(message, "--no-pack-sequences")
