"""The memory of a plan as lines of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_cli.cli.console import table
from relax_cli.cli.lines import wrapped
from relax_cli.preflight.memory.gpu import GpuMemory
from relax_cli.preflight.memory.sizes import LIBRARIES, RoleMemory, in_bytes
from relax_cli.preflight.plan import Plan


def memory_lines(plan: Plan) -> list[str]:
    """What the processes need, in all phases, and what was assumed."""
    lines = ["", "memory (estimate)"]
    if not plan.memory:
        return [*lines, "  not known: the model's config.json was not read"]
    parameters = ", ".join(f"{name} {count:,}" for name, count in plan.parameters.items())
    lines += wrapped(f"  parameters: {parameters}")
    lines += _on_cpu(plan) if plan.gpu is None else _on_gpus(plan, plan.gpu)
    return lines + [line for text in plan.assumptions for line in wrapped(f"  - {text}")]


def simulation_lines(simulation: Mapping[str, Mapping[str, Mapping[str, int]]], plan: Plan | None) -> list[str]:
    """The peaks of a simulated step next to what the plan has for its role."""
    planned = {m.role: m.model_bytes + sum(m.working.values()) for m in (() if plan is None else plan.memory)}
    peaks = {(name, phase): parts for name, phases in simulation.items() for phase, parts in phases.items()}
    heaviest: dict[str, int] = {}
    for (name, _), parts in peaks.items():
        role = name.split()[0]
        heaviest[role] = max(heaviest.get(role, 0), sum(parts.values()))
    rows = []
    for (name, phase), parts in peaks.items():
        role, size = name.split()[0], sum(parts.values())
        # The plan is that of the heaviest stage.
        plan_of_it = _size(planned.get(role, 0)) if role == name or size == heaviest[role] else "-"
        rows.append((f"  {name}, {phase}", in_bytes(size), plan_of_it))
    lines = ["", "memory of a training step (simulated, one process)"]
    lines += table(("  peak of", "simulated", "plan of the role"), rows).splitlines()
    for (name, phase), parts in peaks.items():
        lines += _parts(f"  {name}, {phase}", dict(sorted(parts.items(), key=lambda part: -part[1])))
    return lines


def _on_cpu(plan: Plan) -> list[str]:
    header = ("  one process of", "libraries", "model", "working", "publishing", "peak")
    lines = table(header, [_cpu_row(m) for m in plan.memory]).splitlines()
    for memory in plan.memory:
        lines += _parts(f"  {memory.role}", {**memory.resident, **memory.working})
    lines += _parts("  all processes together", plan.phases)
    here = "" if plan.memory_here is None else f"; this machine has {in_bytes(plan.memory_here)}"
    return [*lines, f"  at their peaks: {in_bytes(plan.peak)}{here}"]


def _cpu_row(memory: RoleMemory) -> Sequence[str]:
    sizes = (
        memory.base_bytes,
        memory.model_bytes,
        sum(memory.working.values()),
        sum(memory.publishing.values()),
        memory.peak_bytes,
    )
    return (f"  {memory.role}", *(_size(size) for size in sizes))


def _on_gpus(plan: Plan, gpu: GpuMemory) -> list[str]:
    sizes = list(dict.fromkeys(fit.gpu for fit in gpu.fits))
    parts = {(fit.phase, fit.gpu): f"{fit.part:.0%}" for fit in gpu.fits}
    by_role = {memory.role: memory for memory in plan.memory}
    rows = []
    for phase in dict.fromkeys(fit.phase for fit in gpu.fits):
        memory = by_role.get(phase)
        held = ("-", "-") if memory is None else (_size(memory.model_bytes), _size(sum(memory.working.values())))
        rows.append((f"  {phase}", *held, *(parts[phase, size] for size in sizes)))
    header = ("  one GPU in phase", "model", "working", *(f"of {_round(size)}" for size in sizes))
    lines = table(header, rows).splitlines()
    for memory in plan.memory:
        lines += _parts(f"  {memory.role}", {**memory.resident, **memory.working})
    lines += _cache_lines(plan, gpu)
    for phase, advice in gpu.advice.items():
        lines += wrapped(f"  {phase} does not fit {_round(sizes[0])}; lower first: {'; then '.join(advice)}")
    gpus = "1 GPU" if gpu.host_gpus == 1 else f"{gpu.host_gpus} GPUs"
    here = "" if plan.memory_here is None or not plan.gpus_here else f"; this machine has {in_bytes(plan.memory_here)}"
    lines.append(f"  host memory of a node of {gpus}: {in_bytes(gpu.host)}{here}")
    for memory in plan.memory:
        lines += _parts(f"    each {memory.role} process", memory.host)
    return lines


def _cache_lines(plan: Plan, gpu: GpuMemory) -> list[str]:
    lines, length = [], plan.steps.longest_prompt + plan.steps.longest_response
    for cache in gpu.caches:
        room = f"{in_bytes(cache.size)}, {cache.sequences} samples of {length} tokens at a time"
        lines += wrapped(f"  SGLang's cache on {_round(cache.gpu)}: {room if cache.size > 0 else 'no room'}")
    if lines:
        lines += wrapped(f"  samples that one server is given in a rollout: {gpu.wanted}; what does not fit waits")
    return lines


def _parts(title: str, parts: dict[str, int]) -> list[str]:
    shown = ", ".join(f"{name} {in_bytes(size)}" for name, size in parts.items() if name != LIBRARIES)
    return wrapped(f"{title}: {shown}", " " * (2 + len(title) - len(title.lstrip()))) if shown else []


def _size(size: int) -> str:
    return in_bytes(size) if size else "-"


def _round(size: int) -> str:
    return f"{size / 10**9:.0f} GB"
