"""Rules about what this machine lacks. They are notes where the configuration may be meant for another machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from relax_cli.config.placement import shared_bundles
from relax_cli.config.schema import Config
from relax_cli.errors import Problem
from relax_cli.preflight.inputs import Facts
from relax_cli.preflight.machine import Machine
from relax_cli.preflight.memory.estimate import checkpoint_bytes, host_peak, roles_memory
from relax_cli.preflight.memory.sizes import in_bytes
from relax_cli.preflight.rules.backend import expandable_segments
from relax_cli.preflight.rules.files import Found
from relax_cli.preflight.rules.gpu import gpu_memory_fits, host_memory_fits, server_cache

MACHINE_IDS = frozenset(
    {
        "ranks-vs-cores",
        "model-package-missing",
        "bridge-missing",
        "reasoning-gym-missing",
        "parquet-missing",
        "folder-read-only",
        "sglang-missing",
    }
)
"""Rules in other modules that are about this machine, too."""


def machine_problems(config: Config, facts: Facts, machine: Machine) -> list[Problem]:
    """Everything that this machine lacks."""
    problems: list[Problem] = []
    for rule in MACHINE_RULES:
        found = rule(config, facts, machine)
        problems += [] if found is None else [found] if isinstance(found, Problem) else found
    return problems


def gpus(config: Config, facts: Facts, machine: Machine) -> Found:
    """`--device cuda` needs as many GPUs as the largest role has ranks."""
    needed = shared_bundles(config.parallel, config.sglang)
    if config.parallel.device != "cuda" or machine.ray_address or machine.gpus >= needed:
        return None
    return Problem(
        id="no-cuda-device" if machine.gpus == 0 else "too-few-gpus",
        message=f"this machine has {machine.gpus or 'no'} GPU{'s' if machine.gpus > 1 else ''}, the run needs {needed}",
        fix="run it where the GPUs are, or use --device cpu, or lower the counts in --resource",
        option="--device",
        got=f"{machine.gpus} GPUs",
        expected=f"{needed} GPUs",
    )


def memory(config: Config, facts: Facts, machine: Machine) -> Found:
    """On a CPU weights, gradients and moments fit the memory; a peak that may not is a warning."""
    lengths = facts.lengths_for(config)
    if facts.model is None or machine.memory is None or config.parallel.device == "cuda" or machine.ray_address:
        return None
    estimate = roles_memory(config, tuple(config.parallel.resource), facts.model, lengths)
    certain = sum(m.ranks * m.model_bytes for m in estimate)
    peak = host_peak(config, estimate)
    if peak <= machine.memory:
        return None
    is_certain = certain > machine.memory
    return Problem(
        id="memory-too-small" if is_certain else "memory-tight",
        message="the models do not fit this machine's memory"
        if is_certain
        else "the run may need more memory than there is",
        fix="choose a smaller model, or fewer ranks in --resource"
        if is_certain
        else "lower --micro-batch-size or --rollout-max-response-len, or use fewer ranks in --resource",
        option="--hf-checkpoint" if is_certain else "--micro-batch-size",
        got=f"{in_bytes(machine.memory)} here",
        expected=f"{in_bytes(certain)} for weights, gradients and moments" if is_certain else f"about {in_bytes(peak)}",
        severity="error" if is_certain else "warning",
    )


def disk(config: Config, facts: Facts, machine: Machine) -> Found:
    """The checkpoints of a run fit the disk, a new pair beside the ones that are kept."""
    save = config.checkpoint.save
    if save is None or facts.model is None:
        return None
    one = checkpoint_bytes(config, facts.model)
    free, kept = machine.free_disk(save), kept_checkpoints(config, facts)
    if free is None or kept * one <= free:
        return None
    fits = free // one
    return Problem(
        id="disk-too-small" if fits == 0 else "disk-fills-up",
        message="the disk has no room for a checkpoint" if fits == 0 else f"the disk is full after {fits} checkpoints",
        fix="make room, or choose another --save"
        if fits < 2
        else f"--keep-checkpoints {fits - 1} (one more is written before the oldest goes), or make room",
        option="--save",
        got=f"{in_bytes(free)} free",
        expected=f"{in_bytes(kept * one)}: {kept} x {in_bytes(one)}",
        severity="error" if fits == 0 else "warning",
    )


def kept_checkpoints(config: Config, facts: Facts) -> int:
    """Most checkpoints that are on disk at a time."""
    section, rollouts = config.checkpoint, facts.rollouts(config)
    written = 1
    if section.save_interval is not None and rollouts is not None:
        written = -(-rollouts // section.save_interval)
    return written if section.keep_checkpoints is None else min(written, section.keep_checkpoints + 1)


def tensorboard(config: Config, facts: Facts, machine: Machine) -> Found:
    """`--tensorboard` needs its extra."""
    if not config.run.tensorboard or importlib.util.find_spec("tensorboard") is not None:
        return None
    return Problem(
        id="tensorboard-missing",
        message="the tensorboard package is not installed",
        fix="pip install 'relax-cli[tensorboard]', or drop --tensorboard",
        option="--tensorboard",
    )


MACHINE_RULES: tuple[Callable[[Config, Facts, Machine], Found], ...] = (
    gpus,
    memory,
    gpu_memory_fits,
    server_cache,
    host_memory_fits,
    disk,
    expandable_segments,
    tensorboard,
)
