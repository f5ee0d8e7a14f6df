"""Rules about the memory of this machine and its GPUs, by the estimates of `relax_cli.preflight.memory`."""

from __future__ import annotations

from collections.abc import Iterator

from relax_cli.config.schema import Config
from relax_cli.errors import MACHINE_THEME
from relax_cli.preflight.machine import Machine
from relax_cli.preflight.memory.gpu import Fit, GpuMemory, certain_bytes
from relax_cli.preflight.memory.sizes import in_bytes
from relax_cli.preflight.plan import MemoryPlan
from relax_cli.preflight.rules.registry import Finding, Found, rule


@rule("memory-too-small", MACHINE_THEME, option="--hf-checkpoint", needs="machine")
def memory_too_small(memory: MemoryPlan | None, machine: Machine) -> Found:
    """Weights, gradients and Adam's moments alone are more than the memory of this machine."""
    certain, _, here = _cpu_memory(memory, machine)
    if certain > here:
        fix = "choose a smaller model, or fewer ranks in --resource"
        expected = f"{in_bytes(certain)} for weights, gradients and moments"
        yield Finding("the models do not fit this machine's memory", fix, f"{in_bytes(here)} here", expected)


@rule("memory-tight", MACHINE_THEME, option="--micro-batch-size", severity="warning", needs="machine")
def memory_tight(memory: MemoryPlan | None, machine: Machine) -> Found:
    """A warning: by the estimate (shown in the plan with its assumptions) the run may need more memory than there
    is."""
    certain, peak, here = _cpu_memory(memory, machine)
    if certain <= here < peak:
        message = "the run may need more memory than this machine has"
        fix = "lower --micro-batch-size or --rollout-max-response-len, or use fewer ranks in --resource"
        yield Finding(message, fix, f"{in_bytes(here)} here", f"about {in_bytes(peak)}")


def _cpu_memory(memory: MemoryPlan | None, machine: Machine) -> tuple[int, int, int]:
    """Bytes needed for certain, bytes at the peak, and bytes of this machine; zeros where the run is not its own."""
    if memory is None or memory.gpu is not None or machine.memory is None or machine.ray_address:
        return 0, 0, 0
    return sum(m.ranks * m.model_bytes for m in memory.roles), memory.peak, machine.memory


@rule("gpu-memory-too-small", MACHINE_THEME, option="--resource", needs="machine")
def gpu_memory_too_small(memory: MemoryPlan | None, machine: Machine) -> Found:
    """What a role needs for certain (weights, gradients, optimizer) is more than a GPU of this machine has. The fix
    lists what to lower, the option that costs least first. Only where `nvidia-smi` shows GPUs."""
    for fit, held, advice, option in _misfits(memory, machine):
        if held > fit.gpu:
            message, expected = f"{fit.phase} does not fit a GPU of this machine", f"{in_bytes(held)} for certain"
            yield Finding(message, advice, f"{in_bytes(fit.gpu)} a GPU", expected, option)


@rule("gpu-memory-tight", MACHINE_THEME, option="--resource", severity="warning", needs="machine")
def gpu_memory_tight(memory: MemoryPlan | None, machine: Machine) -> Found:
    """A warning: with the largest batches, or with SGLang's part, a phase may need more than a GPU of this machine
    has."""
    for fit, held, advice, option in _misfits(memory, machine):
        if held <= fit.gpu:
            message = f"{fit.phase} may need more memory than a GPU of this machine has"
            yield Finding(message, advice, f"{in_bytes(fit.gpu)} a GPU", f"about {in_bytes(fit.needed)}", option)


def _misfits(memory: MemoryPlan | None, machine: Machine) -> Iterator[tuple[Fit, int, str, str | None]]:
    """Phases that do not fit a GPU of this machine, the bytes each needs for certain, what to lower, and the option."""
    gpu = _on_gpus_here(memory, machine)
    if memory is None or gpu is None or machine.gpu_memory() is None:
        return
    by_role = {m.role: m for m in memory.roles}
    for fit in gpu.fits:
        if not fit.fits:
            held = certain_bytes(by_role[fit.phase]) if fit.phase in by_role else fit.needed
            advice = ", ".join(gpu.advice.get(fit.phase, ["a higher --tensor-model-parallel-size"]))
            option = "--sglang-mem-fraction-static" if fit.phase == "rollout" else None
            yield fit, held, f"in this order: {advice}", option


@rule("sglang-cache-too-small", MACHINE_THEME, option="--sglang-mem-fraction-static", needs="machine")
def sglang_cache_too_small(config: Config, memory: MemoryPlan | None, machine: Machine) -> Found:
    """`--sglang-mem-fraction-static` covers weights and KV cache of a server. Next to the weights there is no room for
    one sample of full length."""
    gpu = _on_gpus_here(memory, machine) if machine.gpu_memory() is not None else None
    for cache in gpu.caches if gpu else ():
        if not cache.sequences and gpu:
            more = 2 * config.sglang.rollout_num_gpus_per_engine
            yield Finding(
                "SGLang's part of a GPU has no room for a single sample of full length",
                f"--rollout-num-gpus-per-engine {more}, or raise --sglang-mem-fraction-static",
                f"{in_bytes(max(0, cache.size))} besides the weights, of {gpu.fraction:g} × {in_bytes(cache.gpu)}",
                f"keys and values of {config.rollout.rollout_max_response_len} and more tokens",
            )


@rule("host-memory-too-small", MACHINE_THEME, needs="machine")
def host_memory_too_small(config: Config, memory: MemoryPlan | None, machine: Machine) -> Found:
    """Roles of a GPU run sleep in host memory, and `--optimizer-cpu-offload` keeps moments there. Together they need
    more than this machine has."""
    gpu = _on_gpus_here(memory, machine)
    if gpu is not None and machine.memory is not None and gpu.host > machine.memory:
        shard = "" if config.optimizer.use_distributed_optimizer else "--use-distributed-optimizer, "
        option = "--optimizer-cpu-offload" if config.optimizer.optimizer_cpu_offload else "--resource"
        message = "sleeping roles and offloaded optimizers do not fit this machine's memory"
        fix, got = f"{shard}a larger machine, or a smaller model", f"{in_bytes(machine.memory)} here"
        yield Finding(message, fix, got, in_bytes(gpu.host), option)


def _on_gpus_here(memory: MemoryPlan | None, machine: Machine) -> GpuMemory | None:
    """The plan of GPUs, where the run would use those of this machine."""
    return None if memory is None or machine.gpus == 0 or machine.ray_address else memory.gpu
