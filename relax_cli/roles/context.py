"""What a role knows of its run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relax_cli.config.schema import Config, Section
from relax_cli.plugin.graph import RoleSpec
from relax_cli.plugin.records import Estimator
from relax_cli.roles.queue import SampleQueue


@dataclass(frozen=True)
class RoleContext:
    """The run, seen from one rank of one role."""

    config: Config
    estimator: Estimator
    options: Section
    """The estimator's own options."""
    spec: RoleSpec
    """The role and the queue fields that it reads and writes."""
    queue: SampleQueue
    run_dir: Path
    rank: int
    ranks: int
