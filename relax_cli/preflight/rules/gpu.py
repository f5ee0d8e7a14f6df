"""Rules about the memory of GPUs and of the host they are in. Notes, where the run is meant for another machine."""

from __future__ import annotations

from relax_cli.config.placement import shared_bundles
from relax_cli.config.schema import Config
from relax_cli.errors import Problem
from relax_cli.preflight.inputs import Facts
from relax_cli.preflight.machine import Machine
from relax_cli.preflight.memory.estimate import roles_memory
from relax_cli.preflight.memory.gpu import (
    GpuMemory,
    certain_bytes,
    gpu_memory,
    host_bytes,
)
from relax_cli.preflight.memory.sizes import RoleMemory, in_bytes
from relax_cli.preflight.rules.files import Found


def gpu_memory_fits(config: Config, facts: Facts, machine: Machine) -> Found:
    """Every phase fits one of this machine's GPUs: what is held for certain, and with the largest batches."""
    size = machine.gpu_memory() if _runs_here(config, machine) else None
    if size is None or facts.model is None:
        return None
    memory, plan = _estimate(config, facts, size, machine)
    by_role = {m.role: m for m in memory}
    problems = []
    for fit in plan.fits:
        if fit.fits:
            continue
        held = certain_bytes(by_role[fit.phase]) if fit.phase in by_role else fit.needed
        is_certain = held > size
        advice = plan.advice.get(fit.phase, ("a higher --tensor-model-parallel-size",))
        problems.append(
            Problem(
                id="gpu-memory-too-small" if is_certain else "gpu-memory-tight",
                message=f"{fit.phase} does not fit a GPU of this machine"
                if is_certain
                else f"{fit.phase} may need more memory than a GPU of this machine has",
                fix=f"in this order: {', '.join(advice)}",
                option="--sglang-mem-fraction-static" if fit.phase == "rollout" else "--resource",
                got=f"{in_bytes(size)} a GPU",
                expected=f"{in_bytes(held)} for certain" if is_certain else f"about {in_bytes(fit.needed)}",
                severity="error" if is_certain else "warning",
            )
        )
    return problems


def server_cache(config: Config, facts: Facts, machine: Machine) -> Found:
    """SGLang's static part holds the weights, and a KV cache for at least one sample of full length."""
    size = machine.gpu_memory() if _runs_here(config, machine) else None
    if size is None or facts.model is None:
        return None
    _, plan = _estimate(config, facts, size, machine)
    if all(cache.sequences for cache in plan.caches):
        return None
    (cache,) = plan.caches
    return Problem(
        id="sglang-cache-too-small",
        message="SGLang's part of a GPU has no room for a single sample of full length",
        fix=f"--rollout-num-gpus-per-engine {2 * config.sglang.rollout_num_gpus_per_engine}, or raise "
        "--sglang-mem-fraction-static",
        option="--sglang-mem-fraction-static",
        got=f"{in_bytes(max(0, cache.size))} beside the weights, of {plan.fraction:g} x {in_bytes(size)}",
        expected=f"keys and values of {config.rollout.rollout_max_response_len} and more tokens",
    )


def host_memory_fits(config: Config, facts: Facts, machine: Machine) -> Found:
    """Sleeping roles and offloaded optimizers fit the host's memory."""
    if not _runs_here(config, machine) or machine.memory is None or facts.model is None:
        return None
    bundles = shared_bundles(config.parallel, config.sglang)
    memory = roles_memory(config, tuple(config.parallel.resource), facts.model, facts.lengths_for(config))
    needed = host_bytes(memory, min(bundles, machine.gpus), bundles)
    if needed <= machine.memory:
        return None
    fix = "--use-distributed-optimizer, " if not config.optimizer.use_distributed_optimizer else ""
    return Problem(
        id="host-memory-too-small",
        message="sleeping roles and offloaded optimizers do not fit this machine's memory",
        fix=f"{fix}a larger machine, or a smaller model",
        option="--optimizer-cpu-offload" if config.optimizer.optimizer_cpu_offload else "--resource",
        got=f"{in_bytes(machine.memory)} here",
        expected=in_bytes(needed),
    )


def _runs_here(config: Config, machine: Machine) -> bool:
    return config.parallel.device == "cuda" and machine.gpus > 0 and not machine.ray_address


def _estimate(config: Config, facts: Facts, size: int, machine: Machine) -> tuple[list[RoleMemory], GpuMemory]:
    assert facts.model is not None
    lengths = facts.lengths_for(config)
    memory = roles_memory(config, tuple(config.parallel.resource), facts.model, lengths)
    return memory, gpu_memory(config, facts.model, memory, lengths, size, machine.gpus)
