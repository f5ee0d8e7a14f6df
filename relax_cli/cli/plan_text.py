"""A plan as text of 80 columns."""

from __future__ import annotations

from relax_cli.cli.console import table
from relax_cli.cli.lines import wrapped
from relax_cli.cli.memory_text import memory_lines
from relax_cli.preflight.memory.sizes import in_bytes
from relax_cli.preflight.plan import Plan, RolePlan


def plan_lines(plan: Plan) -> list[str]:
    """Roles, placement, steps, memory and disk."""
    parts = (_roles(plan), _placement(plan), _steps(plan), memory_lines(plan), _disk(plan))
    return [line for part in parts for line in part]


def _roles(plan: Plan) -> list[str]:
    lines = ["roles, in the order of a step"]
    for role in plan.roles:
        lines += wrapped(f"  {role.name:<11} {role.summary}", " " * 14)
        lines += wrapped(f"{'':<14}reads  {' '.join(role.reads) or '-'}", " " * 21)
        lines += wrapped(f"{'':<14}writes {' '.join(role.writes) or '-'}", " " * 21)
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
    lines += wrapped(f"  {bundles} of one placement group, shared in turns by {', '.join(shared)}")
    lines += wrapped(f"  Ray needs {plan.logical_cpus} logical CPUs (roles take turns: more than cores is fine)")
    gpus = f"  GPUs needed: {plan.gpus}, {plan.gpus_why}" if plan.gpus else f"  GPUs needed: {plan.gpus_why}"
    return [*lines, *wrapped(gpus)]


def _bundles(role: RolePlan) -> str:
    if not role.bundles:
        return "-"
    return "0" if len(role.bundles) == 1 else f"0-{role.bundles[-1]}"


def _steps(plan: Plan) -> list[str]:
    s = plan.steps
    lines = ["", "steps"]
    samples = f"{s.prompts_per_rollout} prompts x {_count(s.samples_per_prompt, 'sample')} = {s.samples_per_rollout}"
    steps = f"{_count(s.steps_per_rollout, 'optimizer step')} x {s.samples_per_step} samples"
    lines += wrapped(f"  a rollout: {samples} samples = {steps}")
    if s.rollouts is None:
        lines.append("  rollouts: as many as --num-epoch gives; the data were not read")
    else:
        steps = ", ".join(f"{count} of the {role}" for role, count in s.optimizer_steps.items())
        resumed = f", resuming at {s.first_rollout}" if s.first_rollout else ""
        lines += wrapped(f"  the run: {s.rollouts} rollouts{resumed}; optimizer steps: {steps}")
    lines += wrapped(
        f"  tokens of a rollout: at most {s.samples_per_rollout} x ({s.longest_prompt} prompt + {s.longest_response}"
        f" response) = {s.most_tokens_per_rollout}"
    )
    if s.prompts is not None and s.rollouts is not None:
        passes = s.rollouts * s.prompts_per_rollout / s.prompts
        times = f"{passes:.0f}" if passes >= 10 else f"{passes:.2g}"
        lines += wrapped(f"  data: {s.prompts} prompts, used {times} times")
    return lines


def _disk(plan: Plan) -> list[str]:
    lines = ["", "disk"]
    if not plan.checkpoint:
        return [*lines, "  no checkpoints" if plan.memory else "  checkpoints: size not known"]
    needed = (
        f"{plan.checkpoints_kept} x {in_bytes(plan.checkpoint)} = {in_bytes(plan.checkpoint * plan.checkpoints_kept)}"
    )
    free = "" if plan.disk_free is None else f", {in_bytes(plan.disk_free)} free"
    return [*lines, *wrapped(f"  checkpoints: {needed}{free}")]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
