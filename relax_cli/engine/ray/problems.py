"""What is said where Ray does not start, or is too small."""

from __future__ import annotations

import os
import socket

from relax_cli.config.placement import QUEUE_CPUS, ranks_of
from relax_cli.engine.ray import LOOPBACK_SWITCH
from relax_cli.errors import EnvironmentFault, Problem, problem_kind
from relax_cli.plugin.launch_plan import LaunchPlan
from relax_cli.preflight.rules.resources import ray_cpus

CONNECTING_SECONDS = 20.0

RAY_START_FAILED = problem_kind(
    "ray-start-failed",
    "This machine",
    "Ray did not start in time, which happens on a busy machine, or the cluster of `RAY_ADDRESS` does not answer. "
    "Ray's own logs are in `/tmp/ray/session_latest/logs`.",
)
RAY_NOT_LOCAL = problem_kind(
    "ray-not-local",
    "This machine",
    "Ray was to start on this machine alone, but listens on an address that other machines can reach.",
)
RAY_GPUS = problem_kind(
    "ray-gpus",
    "Roles, devices, parallelism",
    "The Ray cluster has fewer GPUs, busy ones included, than the roles share. A run waits for GPUs that others use.",
    option="--resource",
)


def check_reachable(address: str | None) -> None:
    """Find out whether anything listens at a cluster's `HOST:PORT`; Ray would go on trying for minutes.

    Raises:
        EnvironmentFault: nothing does. Of other forms of an address nothing is found out.
    """
    host, _, port = (address or "").rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECTING_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise EnvironmentFault(start_failed(address, error)) from error


def start_failed(address: str | None, error: Exception) -> Problem:
    """The problem of a `ray.init` that raised.

    Args:
        address: what it was told: `local`, or the cluster that RAY_ADDRESS names.
    """
    local = address == "local"
    again = "end what keeps this machine busy and start again"
    cluster = f"see whether it runs: ray status --address {address}; unset RAY_ADDRESS starts a Ray of the run's own"
    logs = "Ray's logs are in /tmp/ray/session_latest/logs, and `ray stop` ends every Ray that you left running here"
    return RAY_START_FAILED(
        "Ray did not start" if local else "the Ray cluster of RAY_ADDRESS cannot be joined",
        where="this machine" if local else f"RAY_ADDRESS={address}",
        got=f"{type(error).__name__}: {error}".splitlines()[0][:300],
        expected="a Ray that answers",
        fix=f"{again}; {logs}" if local else cluster,
    )


def not_local(address: str) -> Problem:
    """The problem of a Ray of the run's own that other machines can reach."""
    return RAY_NOT_LOCAL(
        "Ray listens on an address that other machines can reach",
        where=address,
        got=f"{LOOPBACK_SWITCH}={os.environ.get(LOOPBACK_SWITCH, '')}, set when Ray was imported",
        expected="127.0.0.1",
        fix=f"export {LOOPBACK_SWITCH}=0 before the process starts that imports ray",
    )


def too_few_cpus(plan: LaunchPlan, free: float, needed: int) -> Problem:
    """The problem of a Ray with `free` logical CPUs, where the run needs `needed`."""
    roles = ", ".join(f"{role.name} {ranks_of(plan.config.parallel, role.name)}" for role in plan.graph.roles)
    return ray_cpus.kind(
        "Ray has too few free logical CPUs for the roles and TransferQueue",
        where="the Ray cluster",
        got=f"{free:g} free",
        expected=f"at least {needed} ({roles}, TransferQueue {QUEUE_CPUS})",
        option="--resource",
        fix=f"use fewer workers in --resource, or start Ray with more: ray start --head --num-cpus {needed}",
    )


def too_few_gpus(there: int, needed: int) -> Problem:
    """The problem of a Ray that has, busy ones included, fewer GPUs than the roles share."""
    return RAY_GPUS(
        "Ray has too few GPUs for the roles",
        where="the Ray cluster",
        got=f"{there} GPUs",
        expected=f"at least {needed}",
        fix="lower the counts in --resource, join a larger cluster (RAY_ADDRESS), or use --device cpu",
    )
