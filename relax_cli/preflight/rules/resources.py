"""Rules about the roles of `--resource`, how they share devices, and the processes that run them."""

from __future__ import annotations

import json
import shlex

from relax_cli.config import placement
from relax_cli.config.names import nearest
from relax_cli.config.schema import Config, ParallelSection, SglangSection
from relax_cli.errors import MACHINE_THEME
from relax_cli.preflight.machine import Machine
from relax_cli.preflight.rules.registry import Finding, Found, rule

THEME = "Roles, devices, parallelism"
ROLES = ("actor", "critic", "rollout", "advantages", "reference")
DEVICE_ROLES = ("actor", "critic", "rollout", "reference")
"""Roles with a model."""
TRAINED_ROLES = ("actor", "critic", "reference")
"""Roles whose ranks form a Megatron tensor- and data-parallel grid."""
MOST_RANKS_PER_CORE = 4


@rule("resource-unknown-role", THEME, option="--resource")
def resource_unknown_role(parallel: ParallelSection) -> Found:
    """`--resource` names a role that does not exist."""
    for role in parallel.resource:
        if role not in ROLES:
            guess = nearest(role, [name for name in ROLES if name not in parallel.resource])
            fix = f'write "{guess}" instead of "{role}"' if guess else f'drop "{role}" from --resource'
            yield Finding(f"--resource names the unknown role {role!r}", fix, role, ", ".join(ROLES))


@rule("resource-missing-role", THEME, option="--resource")
def resource_missing_role(parallel: ParallelSection) -> Found:
    """`--resource` needs at least `actor` and `rollout`."""
    meant = {nearest(role, ROLES) for role in parallel.resource if role not in ROLES}
    for role in ("actor", "rollout"):
        # A misspelt role is one problem, not two.
        if role not in parallel.resource and role not in meant:
            fix, got = f'add "{role}": [1, 1] to --resource', ", ".join(parallel.resource)
            yield Finding(f"--resource has no {role}", fix, got, "at least actor and rollout")


@rule("resource-one-service", THEME, option="--resource")
def resource_one_service(parallel: ParallelSection) -> Found:
    """Every role is exactly one service; the second number is its size."""
    for role, (services, devices) in parallel.resource.items():
        if services != 1:
            yield _count(role, services, devices, "exactly one service per role")


@rule("resource-negative", THEME, option="--resource")
def resource_negative(parallel: ParallelSection) -> Found:
    """A count of `--resource` is below 0."""
    for role, (services, devices) in parallel.resource.items():
        if devices < 0:
            yield _count(role, services, devices, "a device count of 0 or more")


@rule("resource-no-device", THEME, option="--resource")
def resource_no_device(parallel: ParallelSection) -> Found:
    """A role with a model needs at least one device (on a CPU: one process). `advantages` may have 0."""
    for role, (services, devices) in parallel.resource.items():
        if devices == 0 and role in DEVICE_ROLES:
            yield _count(role, services, devices, "at least one device for a model")


def _count(role: str, services: int, devices: int, expected: str) -> Finding:
    fix = f'write "{role}": [1, {max(devices, int(role in DEVICE_ROLES))}] in --resource'
    got = f'"{role}": [{services}, {devices}]'
    return Finding(f"--resource gives {role} impossible counts", fix, got, expected)


@rule("local-launcher-one-process", THEME, option="--launcher")
def local_launcher_one_process(parallel: ParallelSection) -> Found:
    """`--launcher local` runs everything in one process, so no role can have two."""
    wide = {role: n for role, (_, n) in parallel.resource.items() if n > 1}
    if parallel.launcher == "local" and wide:
        got = ", ".join(f"{role} on {n}" for role, n in wide.items())
        yield Finding("", "--launcher ray, or write a count of 1 for every role", got, "at most 1 device per role")


@rule("fully-async-not-supported", THEME, option="--fully-async")
def fully_async_not_supported(parallel: ParallelSection) -> Found:
    """`--fully-async` would generate while training, which is not supported."""
    if parallel.fully_async:
        message = "generating while training is not supported: every rollout is sampled by the newest weights"
        yield Finding(message, "drop --fully-async")


@rule("ranks-not-divisible", THEME, option="--resource")
def ranks_not_divisible(parallel: ParallelSection) -> Found:
    """The ranks of a trained role must be a multiple of tensor × pipeline × context parallel size."""
    grid = parallel.grid
    ranks = {role: n for role, (_, n) in parallel.resource.items() if role in TRAINED_ROLES and n > 0 and n % grid}
    if ranks:
        whole = {role: [1, max(1, round(n / grid)) * grid] for role, n in ranks.items()}
        launcher = "--launcher ray " if parallel.launcher == "local" else ""
        message = f"ranks of {' and '.join(ranks)} must be a multiple of tensor × pipeline × context parallel size"
        fix = f"{launcher}--resource {shlex.quote(json.dumps(parallel.resource | whole))}"
        yield Finding(message, fix, ", ".join(f"{role} {n}" for role, n in ranks.items()), f"a multiple of {grid}")


@rule("overlap-needs-cpu", THEME, option="--overlap-updates")
def overlap_needs_cpu(parallel: ParallelSection) -> Found:
    """On a GPU actor and critic take turns in memory, so `--overlap-updates` is for CPU runs."""
    if parallel.overlap_updates and parallel.device == "cuda":
        yield Finding(fix="drop --overlap-updates", got="--device cuda", expected="--device cpu")


@rule("ray-cpus", THEME, option="--ray-num-cpus")
def ray_cpus(parallel: ParallelSection, sglang: SglangSection) -> Found:
    """Ray has fewer logical CPUs than the roles and TransferQueue take. TransferQueue would wait for one forever."""
    given = parallel.ray_num_cpus
    # Counts that make no sense have rules of their own.
    if given is None or any(min(counts) < 0 for counts in parallel.resource.values()):
        return
    needed = placement.needed_cpus(parallel, sglang)
    if given < needed:
        queue, services = placement.QUEUE_CPUS, placement.SERVICE_CPUS
        terms = f"{needed - queue - services} for the roles, {queue} for TransferQueue, {services} for other services"
        fix = f"--ray-num-cpus {needed} (logical: more than cores is fine), or fewer workers in --resource"
        message = "the roles and TransferQueue need more logical CPUs than Ray would have"
        yield Finding(message, fix, expected=f"at least {needed}: {terms}")


@rule("unequal-shapes", THEME, option="--resource", severity="warning")
def unequal_shapes(parallel: ParallelSection, sglang: SglangSection) -> Found:
    """On GPUs, roles of different sizes leave GPUs idle while the smaller one works. A warning that says which."""
    sizes = {
        role: services * devices
        for role, (services, devices) in parallel.resource.items()
        if devices > 0 and placement.takes_bundles(role, parallel, sglang)
    }
    largest = max(sizes.values(), default=0)
    idle = [f"{largest - size} while {role} works" for role, size in sizes.items() if size < largest]
    if parallel.device == "cuda" and idle:
        message = f"roles of unequal size leave GPUs idle: {', '.join(idle)}"
        got = ", ".join(f"{role} {size}" for role, size in sizes.items())
        fix = "give actor, critic and rollout the same number of devices in --resource"
        yield Finding(message, fix, got, f"{largest} for each")


@rule("update-weight-transport", THEME, option="--update-weight-transport")
def update_weight_transport(config: Config) -> Found:
    """On GPUs, servers that the run starts share GPUs with the actor: weights go by `tensor` or `disk`. The GPUs of
    external servers are unknown: weights go by `distributed` or `disk`."""
    chosen = config.sglang.update_weight_transport
    allowed, reason = "tensor", "servers on the actor's own GPUs: NCCL takes one rank per GPU"
    if config.sglang.rollout_external:
        allowed, reason = "distributed", "external servers: their GPUs are unknown"
    on_servers = config.parallel.device == "cuda" and placement.rollout_engine(config) == "sglang"
    if on_servers and chosen not in ("auto", "disk", allowed):
        fix = "drop --update-weight-transport, or use --update-weight-transport disk"
        yield Finding(f"weights cannot go by {chosen} to {reason}", fix, expected=f"auto, {allowed} or disk")


@rule("ranks-vs-cores", MACHINE_THEME, option="--resource", needs="machine")
def ranks_vs_cores(parallel: ParallelSection, machine: Machine) -> Found:
    """On a CPU, a role would run more than four concurrent processes on each core."""
    if parallel.device == "cuda" or (parallel.device == "auto" and machine.gpus):
        return
    most = MOST_RANKS_PER_CORE * machine.cores
    for role, (_, devices) in parallel.resource.items():
        if devices > most:
            grid = parallel.grid if role in TRAINED_ROLES else 1
            message = f"{role} would run {devices} concurrent processes on {machine.cores} cores"
            fix = f'write "{role}": [1, {max(1, machine.cores // grid) * grid}] in --resource'
            fix = fix if grid <= most else "lower the model-parallel sizes, or use a machine with more cores"
            yield Finding(message, fix, str(devices), f"at most {most} on this machine")
