"""Everything decided about a run before it is launched: the argument of the `relax_launch` hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from relax_cli.config.schema import Config
from relax_cli.plugin.graph import ServiceGraph


@dataclass(frozen=True)
class LoadFrom:
    """What one role loads."""

    folder: Path
    """Of one checkpoint: `iter_*` or `release`."""
    weights_only: bool = False
    """The model's tensors alone: optimizer, schedule and random state are new, and so is a value head."""


@dataclass(frozen=True)
class LaunchPlan:
    """What a launcher needs to know."""

    config: Config
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
    longest_prompts: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Tokens of the longest prompt of each held-out set, and of the training prompts under "", with its place; empty
    where they were not counted."""
    patience: float = 0.0
    """Seconds to wait for what a Ray cluster lacks: after a restart, a node that was lost may come back."""
