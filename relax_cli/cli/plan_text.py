"""A plan and problems as text of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from relax_cli.cli.console import table
from relax_cli.config.memory import LIBRARIES, RoleMemory, in_bytes
from relax_cli.config.plan import Plan, RolePlan
from relax_cli.errors import Problem

WIDTH = 80


def problem_lines(problem: Problem, label: str = "") -> list[str]:
    """The four parts; a fix that is typed is never broken into lines."""
    lines = _wrapped(f"{label or problem.severity}: {problem.message}  [{problem.id}]", "  ")
    where = " from ".join(dict.fromkeys(part for part in (problem.option, problem.where) if part))
    for name, text in (("where", where), ("got", problem.got), ("expected", problem.expected)):
        lines += _wrapped(f"  {name:<9} {text}", " " * 12) if text else []
    is_command = problem.fix.startswith(("--", "pip ", "relax "))
    fix = f"  {'fix':<9} {problem.fix}"
    return [*lines, *([fix] if is_command else _wrapped(fix, " " * 12))]


def plan_lines(plan: Plan) -> list[str]:
    """Roles, placement, steps, memory and disk."""
    parts = (_roles(plan), _placement(plan), _steps(plan), _memory(plan), _disk(plan))
    return [line for part in parts for line in part]


def _roles(plan: Plan) -> list[str]:
    lines = ["roles, in the order of a step"]
    for role in plan.roles:
        lines += _wrapped(f"  {role.name:<11} {role.summary}", " " * 14)
        lines += _wrapped(f"{'':<14}reads  {' '.join(role.reads) or '-'}", " " * 21)
        lines += _wrapped(f"{'':<14}writes {' '.join(role.writes) or '-'}", " " * 21)
    return lines


def _placement(plan: Plan) -> list[str]:
    rows = [
        (f"  {r.name}", str(r.processes), str(r.threads), _bundles(r), str(r.idle_bundles or "-")) for r in plan.roles
    ]
    lines = ["", "placement", *table(("  role", "processes", "threads each", "bundles", "idle"), rows).splitlines()]
    if plan.launcher == "local":
        return [*lines, "  --launcher local: everything in this process"]
    shared = [role.name for role in plan.roles if role.bundles]
    bundles = "1 bundle" if plan.bundles == 1 else f"{plan.bundles} bundles"
    lines += _wrapped(f"  {bundles} of one placement group, shared in turns by {', '.join(shared)}")
    lines += _wrapped(f"  Ray needs {plan.logical_cpus} logical CPUs (roles take turns: more than cores is fine)")
    gpus = f"  GPUs needed: {plan.gpus}, {plan.gpus_why}" if plan.gpus else f"  GPUs needed: {plan.gpus_why}"
    return [*lines, *_wrapped(gpus)]


def _bundles(role: RolePlan) -> str:
    if not role.bundles:
        return "-"
    return "0" if len(role.bundles) == 1 else f"0-{role.bundles[-1]}"


def _steps(plan: Plan) -> list[str]:
    s = plan.steps
    lines = ["", "steps"]
    samples = f"{s.prompts_per_rollout} prompts x {_count(s.samples_per_prompt, 'sample')} = {s.samples_per_rollout}"
    steps = f"{_count(s.steps_per_rollout, 'optimizer step')} x {s.samples_per_step} samples"
    lines += _wrapped(f"  a rollout: {samples} samples = {steps}")
    if s.rollouts is None:
        lines.append("  rollouts: as many as --num-epoch gives; the data were not read")
    else:
        steps = ", ".join(f"{count} of the {role}" for role, count in s.optimizer_steps.items())
        resumed = f", going on at {s.first_rollout}" if s.first_rollout else ""
        lines += _wrapped(f"  the run: {s.rollouts} rollouts{resumed}; optimizer steps: {steps}")
    lines += _wrapped(
        f"  tokens of a rollout: at most {s.samples_per_rollout} x ({s.longest_prompt} prompt + {s.longest_response}"
        f" response) = {s.most_tokens_per_rollout}"
    )
    if s.prompts is not None and s.rollouts is not None:
        passes = s.rollouts * s.prompts_per_rollout / s.prompts
        lines += _wrapped(f"  data: {s.prompts} prompts, used {passes:.2g} times")
    return lines


def _memory(plan: Plan) -> list[str]:
    lines = ["", "memory (estimate)"]
    if not plan.memory:
        return [*lines, "  not known: the model's config.json was not read"]
    parameters = ", ".join(f"{name} {count:,}" for name, count in plan.parameters.items())
    lines.append(f"  parameters: {parameters}")
    header = ("  one process of", "libraries", "model", "working", "publishing", "peak")
    lines += table(header, [_memory_row(m) for m in plan.memory]).splitlines()
    for memory in plan.memory:
        parts = {**memory.resident, **memory.working}
        parts.pop(LIBRARIES, None)
        shown = ", ".join(f"{name} {in_bytes(size)}" for name, size in parts.items())
        lines += _wrapped(f"  {memory.role}: {shown}", "    ") if shown else []
    of = "one GPU" if plan.gpus else "all processes together"
    lines += _wrapped(f"  {of}: " + ", ".join(f"{name} {in_bytes(size)}" for name, size in plan.phases.items()), "    ")
    if plan.gpus:
        lines.append(f"  parked on the host while roles sleep: {in_bytes(plan.parked)}")
    else:
        here = "" if plan.memory_here is None else f"; this machine has {in_bytes(plan.memory_here)}"
        lines.append(f"  at their peaks: {in_bytes(plan.peak)}{here}")
    return lines + [line for text in plan.assumptions for line in _wrapped(f"  - {text}", "    ")]


def _memory_row(memory: RoleMemory) -> Sequence[str]:
    sizes = (
        memory.base_bytes,
        memory.model_bytes,
        sum(memory.working.values()),
        sum(memory.publishing.values()),
        memory.peak_bytes,
    )
    return (f"  {memory.role}", *(in_bytes(size) if size else "-" for size in sizes))


def _disk(plan: Plan) -> list[str]:
    lines = ["", "disk"]
    if not plan.checkpoint:
        return [*lines, "  no checkpoints" if plan.memory else "  checkpoints: size not known"]
    needed = (
        f"{plan.checkpoints_kept} x {in_bytes(plan.checkpoint)} = {in_bytes(plan.checkpoint * plan.checkpoints_kept)}"
    )
    free = "" if plan.disk_free is None else f", {in_bytes(plan.disk_free)} free"
    return [*lines, *_wrapped(f"  checkpoints: {needed}{free}")]


def _wrapped(text: str, indent: str = "    ") -> list[str]:
    lines: Iterable[str] = textwrap.wrap(
        text,
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    )
    return list(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
