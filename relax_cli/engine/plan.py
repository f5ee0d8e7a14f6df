"""What a launcher needs to know, and the arithmetic of processes and CPUs, before anything starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from relax_cli.config.schema import Config, ParallelSection
from relax_cli.plugin.graph import ServiceGraph
from relax_cli.plugin.records import Estimator


@dataclass(frozen=True)
class LaunchPlan:
    """Everything decided about a run; the argument of the `relax_launch` hook."""

    config: Config
    estimator: Estimator
    graph: ServiceGraph
    model_folder: Path
    run_dir: Path
    actor_load: Path | None
    """Checkpoint folder (`iter_*`) the actor starts from; None for a cold start."""
    critic_load: Path | None
    status: Callable[[str], None]
    """Shows what is being started."""


def ranks_of(parallel: ParallelSection, role: str) -> int:
    """Worker processes of a role; a service without a device still is one process."""
    services, devices = parallel.resource[role]
    return max(1, services * devices)


def shared_bundles(parallel: ParallelSection, graph: ServiceGraph) -> int:
    """Bundles of the placement group that actor, critic and rollout share: as many as the largest role has ranks."""
    return max(ranks_of(parallel, role.name) for role in graph.roles if role.uses_device)


def threads_of(parallel: ParallelSection, role: str) -> int:
    """CPU threads of one rank, so that the ranks of a role together use every core once."""
    if parallel.threads_per_rank is not None:
        return parallel.threads_per_rank
    return max(1, usable_cores() // ranks_of(parallel, role))


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def optimizer_steps(config: Config, rollouts: int) -> tuple[int, int]:
    """Optimizer steps of a run of `rollouts`: of the actor, which rests in critic-only steps, and of the critic."""
    per_rollout = config.batch.steps_per_rollout
    return max(1, rollouts - config.critic.num_critic_only_steps) * per_rollout, rollouts * per_rollout
