"""A checked run and its plan as people and programs see them, and the bar while its files are read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from relax_cli.cli.console import Output
from relax_cli.cli.text import counted, problem_lines, problems_data, problems_text, wrapped
from relax_cli.config.layers import Layers
from relax_cli.config.text import in_json, table
from relax_cli.errors import ConfigError
from relax_cli.plugin.manager import Plugins
from relax_cli.preflight.check_run import CheckedRun, check_run
from relax_cli.preflight.memory.gpu import GpuMemory
from relax_cli.preflight.memory.sizes import LIBRARIES, in_bytes
from relax_cli.preflight.plan import MemoryPlan, Plan, plan_dict

if TYPE_CHECKING:
    from relax_cli.checkpoint.resume import ResumeDecision

SHOW_PROGRESS_AFTER = 2.0


def as_dict(checked: CheckedRun) -> dict[str, Any]:
    """The object of `--format json`."""
    dump = checked.dump()
    plan = None if checked.plan is None else plan_dict(checked.plan)
    if plan is not None:
        plan["placement"]["notes"] = problems_data(checked.notes)
        start = None if checked.start is None else decision_dict(checked.start.decision)
        plan["steps"] = {**plan["steps"], "start": start}
    return {
        "ok": not checked.errors,
        "problems": problems_data(checked.problems),
        "changes": [{"option": c.option, "from": c.before, "to": c.after, "why": c.why} for c in checked.changes],
        "config": dump["config"],
        "origins": dump["origins"],
        "plan": plan,
    }


def decision_dict(decision: ResumeDecision) -> dict[str, Any]:
    """Where a run starts, as JSON."""
    loads = {
        role: None if source is None else {"path": str(source.folder), "weights_only": source.weights_only}
        for role, source in (("actor", decision.actor), ("critic", decision.critic))
    }
    return {
        "verdict": decision.verdict,
        "iteration": decision.iteration,
        "next_rollout_id": None if decision.verdict == "refuse" else decision.iteration or 0,
        **loads,
        "text": decision.text,
    }


def as_text(checked: CheckedRun, *, show_origin: bool, problems_last: bool = False) -> str:
    """The report for people."""
    notes = [line for note in checked.notes for line in problem_lines(note, "note, about this machine")]
    problems = problems_text(checked.problems, verdict_last=problems_last)
    lines: list[str] = []
    if checked.changes:
        lines += ["", "changed"]
        for change in checked.changes:
            lines += wrapped(f"  - {change.option} {in_json(change.before)}")
            lines += wrapped(f"  + {change.option} {in_json(change.after)}  ({change.why})")
    if show_origin:
        lines += ["", "configuration", *as_recipe(checked.dump()["config"], checked.origins)]
    if checked.start is not None:
        lines += ["", "start", *wrapped(f"  {checked.start.decision.text}")]
    lines += ["", *plan_lines(checked.plan)] if checked.plan is not None else ["", "no plan: see the errors"]
    return "\n".join([*lines[1:], "", *notes, problems] if problems_last else [problems, *notes, *lines])


def show(plugins: Plugins, layers: Layers, output: Output) -> None:
    """Print a configuration with its origins: JSON, or YAML that is a recipe again."""
    checked = check_run(plugins, layers, skip_files=True)
    if not checked.is_read:
        raise ConfigError(checked.problems)
    data = checked.dump()
    changes = [
        f"# changed: {c.option} from {in_json(c.before)} to {in_json(c.after)}, because {c.why}"
        for c in checked.changes
    ]
    output.result(data, "\n".join([*changes, *as_recipe(data["config"], checked.origins)]))


def as_recipe(config: dict[str, dict[str, Any]], origins: dict[str, str]) -> list[str]:
    """A configuration as lines of a recipe, with the origin of each value as a comment."""
    # JSON scalars and flow collections are YAML.
    lines = []
    for section, values in config.items():
        lines.append(f"{section}:")
        rows = [(f"  {key}: {json.dumps(value)}", origins[f"{section}.{key}"]) for key, value in values.items()]
        width = max(len(text) for text, _ in rows)
        lines += [f"{text:<{width}}  # {origin}" for text, origin in rows]
    return lines


@contextmanager
def reading_progress(output: Output) -> Iterator[Callable[[str, float], None]]:
    """Shows on stderr, on a terminal, that a run is checked, and a bar when reading takes longer than two seconds."""
    from rich.progress import Progress

    started, bar = time.monotonic(), Progress(console=output.err, transient=True, disable=not output.err.is_terminal)
    tasks: dict[str, Any] = {}

    def show(name: str, part: float) -> None:
        if time.monotonic() - started < SHOW_PROGRESS_AFTER:
            return
        if name not in tasks:
            tasks[name] = bar.add_task(f"reading {name}", total=1.0)
        bar.update(tasks[name], completed=part)

    with bar:
        bar.add_task("checking configuration, model and data", total=None)
        yield show


def plan_lines(plan: Plan) -> list[str]:
    """Roles, placement, steps, memory and disk."""
    return [*_roles(plan), *_placement(plan), *_steps(plan), *memory_lines(plan), *_disk(plan)]


def _roles(plan: Plan) -> list[str]:
    lines = ["roles, in the order of a step"]
    for role in plan.roles:
        lines += wrapped(f"  {role.spec.name:<11} {role.spec.summary}", " " * 14)
        lines += wrapped(f"{'':<14}reads  {' '.join(role.spec.reads) or '-'}", " " * 21)
        lines += wrapped(f"{'':<14}writes {' '.join(role.spec.writes) or '-'}", " " * 21)
    return lines


def _placement(plan: Plan) -> list[str]:
    rows = []
    for role in plan.roles:
        last = role.bundles[-1] if role.bundles else None
        bundles = "-" if last is None else f"0-{last}" if last else "0"
        numbers = (str(role.processes), str(role.threads), bundles, str(role.idle_bundles or "-"))
        rows.append((f"  {role.spec.name}", *numbers))
    lines = ["", "placement", *table(("  role", "processes", "threads each", "bundles", "idle"), rows).splitlines()]
    if plan.config.parallel.launcher == "local":
        return [*lines, "  --launcher local: everything in this process"]
    shared = [role.spec.name for role in plan.roles if role.bundles]
    bundles = counted(plan.bundles, "bundle")
    lines += wrapped(f"  {bundles} of one placement group, shared in turns by {', '.join(shared)}")
    lines += wrapped(f"  Ray needs {plan.logical_cpus} logical CPUs (roles take turns: more than cores is fine)")
    gpus = f"  GPUs needed: {plan.gpus}, {plan.gpus_why}" if plan.gpus else f"  GPUs needed: {plan.gpus_why}"
    return [*lines, *wrapped(gpus)]


def _steps(plan: Plan) -> list[str]:
    batch, longest = plan.config.batch, plan.lengths
    prompts, samples = batch.rollout_batch_size, batch.samples_per_rollout
    lines = ["", "steps"]
    product = f"{prompts} prompts x {counted(batch.n_samples_per_prompt, 'sample')} = {samples}"
    steps = f"{counted(batch.steps_per_rollout, 'optimizer step')} x {batch.samples_per_step} samples"
    lines += wrapped(f"  a rollout: {product} samples = {steps}")
    if plan.rollouts is None:
        lines.append("  rollouts: as many as --num-epoch gives; the data were not read")
    else:
        steps = ", ".join(f"{count} of the {role}" for role, count in plan.optimizer_steps.items())
        resumed = f", resuming at {plan.first_rollout}" if plan.first_rollout else ""
        lines += wrapped(f"  the run: {plan.rollouts} rollouts{resumed}; optimizer steps: {steps}")
    lines += wrapped(
        f"  tokens of a rollout: at most {samples} x ({longest.prompt} prompt + {longest.response} response)"
        f" = {plan.most_tokens}"
    )
    if plan.prompts is not None and plan.rollouts is not None:
        passes = plan.rollouts * prompts / plan.prompts
        times = f"{passes:.0f}" if passes >= 10 else f"{passes:.2g}"
        lines += wrapped(f"  data: {plan.prompts} prompts, used {times} times")
    return lines


def _disk(plan: Plan) -> list[str]:
    lines, memory = ["", "disk"], plan.memory
    if memory is None or not memory.checkpoint:
        return [*lines, "  no checkpoints" if memory else "  checkpoints: size not known"]
    total = in_bytes(memory.checkpoint * memory.checkpoints_kept)
    needed = f"{memory.checkpoints_kept} x {in_bytes(memory.checkpoint)} = {total}"
    free = "" if plan.disk_free is None else f", {in_bytes(plan.disk_free)} free"
    return [*lines, *wrapped(f"  checkpoints: {needed}{free}")]


def memory_lines(plan: Plan) -> list[str]:
    """What the processes need, in all phases, and what was assumed."""
    lines = ["", "memory (estimate)"]
    if plan.memory is None:
        known = "the model's layers cannot be shared out" if plan.parameters else "the model's config.json was not read"
        return [*lines, f"  not known: {known}"]
    parameters = ", ".join(f"{name} {count:,}" for name, count in plan.parameters.items())
    lines += wrapped(f"  parameters: {parameters}")
    lines += _on_cpu(plan, plan.memory) if plan.memory.gpu is None else _on_gpus(plan, plan.memory, plan.memory.gpu)
    return lines + [line for text in plan.assumptions for line in wrapped(f"  - {text}")]


def simulation_lines(simulation: Mapping[str, Mapping[str, Mapping[str, int]]], plan: Plan | None) -> list[str]:
    """The peaks of a simulated step next to what the plan has for its role."""
    memory = None if plan is None else plan.memory
    planned = {m.role: m.model_bytes + sum(m.working.values()) for m in (memory.roles if memory else ())}
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


def _on_cpu(plan: Plan, memory: MemoryPlan) -> list[str]:
    header = ("  one process of", "libraries", "model", "working", "publishing", "peak")
    rows = []
    for role in memory.roles:
        working, publishing = sum(role.working.values()), sum(role.publishing.values())
        sizes = (role.base_bytes, role.model_bytes, working, publishing, role.peak_bytes)
        rows.append((f"  {role.role}", *map(_size, sizes)))
    lines = table(header, rows).splitlines()
    for role in memory.roles:
        lines += _parts(f"  {role.role}", {**role.resident, **role.working})
    lines += _parts("  all processes together", memory.phases)
    here = "" if plan.machine.memory is None else f"; this machine has {in_bytes(plan.machine.memory)}"
    return [*lines, f"  at their peaks: {in_bytes(memory.peak)}{here}"]


def _on_gpus(plan: Plan, memory: MemoryPlan, gpu: GpuMemory) -> list[str]:
    sizes = list(dict.fromkeys(fit.gpu for fit in gpu.fits))
    parts = {(fit.phase, fit.gpu): f"{fit.needed / fit.gpu:.0%}" for fit in gpu.fits}
    by_role = {role.role: role for role in memory.roles}
    rows = []
    for phase in dict.fromkeys(fit.phase for fit in gpu.fits):
        role = by_role.get(phase)
        held = ("-", "-") if role is None else (_size(role.model_bytes), _size(sum(role.working.values())))
        rows.append((f"  {phase}", *held, *(parts[phase, size] for size in sizes)))
    header = ("  one GPU in phase", "model", "working", *(f"of {_round(size)}" for size in sizes))
    lines = table(header, rows).splitlines()
    for role in memory.roles:
        lines += _parts(f"  {role.role}", {**role.resident, **role.working})
    lines += _cache_lines(plan, gpu)
    for phase, advice in gpu.advice.items():
        lines += wrapped(f"  {phase} does not fit {_round(sizes[0])}; lower first: {'; then '.join(advice)}")
    size = plan.machine.memory if plan.machine.gpus else None
    here = "" if size is None else f"; this machine has {in_bytes(size)}"
    lines.append(f"  host memory of a node of {counted(gpu.host_gpus, 'GPU')}: {in_bytes(gpu.host)}{here}")
    for role in memory.roles:
        lines += _parts(f"    each {role.role} process", role.host)
    return lines


def _cache_lines(plan: Plan, gpu: GpuMemory) -> list[str]:
    lines, length = [], plan.lengths.prompt + plan.lengths.response
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
