"""What a launcher needs to know."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from relax_cli.checkpoint.resume import LoadFrom
from relax_cli.config.schema import Config
from relax_cli.plugin.graph import ServiceGraph
from relax_cli.plugin.records import Estimator
from relax_cli.preflight.plan import optimizer_steps as optimizer_steps


@dataclass(frozen=True)
class LaunchPlan:
    """Everything decided about a run; the argument of the `relax_launch` hook."""

    config: Config
    estimator: Estimator
    graph: ServiceGraph
    model_folder: Path
    run_dir: Path
    actor_load: LoadFrom | None
    """The checkpoint the actor starts from; None for a cold start."""
    critic_load: LoadFrom | None
    status: Callable[[str], None]
    """Shows what is being started."""
    reference_folder: Path | None = None
    """Model folder of the reference role; `model_folder` when None."""


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
