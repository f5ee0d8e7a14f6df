"""Rules about the training back end: which layers it builds, and what its allocator may do. See `checks`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_cli.config.placement import rollout_engine
from relax_cli.config.schema import Config
from relax_cli.errors import Problem
from relax_cli.models.hybrid import language_config
from relax_cli.models.spec import BRIDGE_FAMILIES
from relax_cli.preflight.inputs import Facts
from relax_cli.preflight.machine import Machine

if TYPE_CHECKING:
    from relax_cli.preflight.rules.files import Found, Surroundings


def transformer_engine(config: Config) -> Found:
    """TransformerEngine's layers need CUDA."""
    if config.parallel.transformer_impl != "transformer_engine" or config.parallel.device != "cpu":
        return None
    return Problem(
        id="transformer-engine-needs-cuda",
        message="TransformerEngine's layers do not run on a CPU",
        fix="--transformer-impl auto, or --device cuda",
        option="--transformer-impl",
        got="transformer_engine with --device cpu",
        expected="auto or local",
    )


def recompute_chunks(config: Config, around: Surroundings) -> Found:
    """Chunks of layers that are computed again together are equally long: Megatron-core reads beyond the last layer."""
    section, layers = config.parallel, _layers(config)
    size = section.recompute_num_layers
    is_uniform = section.recompute_granularity == "full" and section.recompute_method == "uniform"
    if not is_uniform or size is None or layers is None or layers % size == 0:
        return None
    fitting = max(n for n in range(1, layers + 1) if layers % n == 0 and n <= size)
    return Problem(
        id="recompute-layers",
        message=f"the model's {layers} layers do not make whole chunks of {size}",
        fix=f"--recompute-num-layers {fitting}",
        option="--recompute-num-layers",
        got=str(size),
        expected=f"a divisor of {layers}",
    )


def bridge_layout(config: Config, around: Surroundings) -> Found:
    """Models of Megatron-Bridge are trained without sequence parallelism."""
    section = config.parallel
    if not section.sequence_parallel or section.tensor_model_parallel_size == 1:
        return None
    return bridge_sequence_parallel() if _config_json(config).get("model_type") in BRIDGE_FAMILIES else None


def bridge_sequence_parallel() -> Problem:
    """What is wrong with sequence parallelism for a model of Megatron-Bridge."""
    return Problem(
        id="bridge-sequence-parallel",
        message="models of Megatron-Bridge are not trained with sequence parallelism",
        fix="drop --sequence-parallel",
        option="--sequence-parallel",
        got="on",
        expected="off",
    )


def expandable_segments(config: Config, facts: Facts, machine: Machine) -> Found:
    """Memory that the allocator maps piece by piece can neither be released by SGLang's memory saver nor be shared."""
    engine = rollout_engine(config.rollout, config.sglang, config.parallel)
    if engine != "sglang" or config.sglang.rollout_external or config.parallel.device != "cuda":
        return None
    setting = machine.allocator.replace(" ", "").lower()
    if "expandable_segments:true" not in setting:
        return None
    return Problem(
        id="expandable-segments",
        message="SGLang cannot sleep or take weights over CUDA IPC from memory in expandable segments",
        fix="unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF",
        option="--rollout-engine",
        where="PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF",
        got=machine.allocator,
        expected="no expandable_segments:True",
    )


def _layers(config: Config) -> int | None:
    layers = language_config(_config_json(config)).get("num_hidden_layers")
    return layers if type(layers) is int and layers > 0 else None


def _config_json(config: Config) -> dict[str, Any]:
    try:
        found = json.loads((Path(config.model.hf_checkpoint) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}  # `model_checks` reports it
    return found if isinstance(found, dict) else {}


BACKEND_RULES: tuple[Callable[[Config], Found], ...] = (transformer_engine,)
BACKEND_FILE_RULES: tuple[Callable[[Config, Surroundings], Found], ...] = (recompute_chunks, bridge_layout)
