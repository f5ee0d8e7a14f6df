"""The hooks a plugin may implement. Entry-point group: `relax.plugins`; its name is the plugin's name.

A plugin is a module (or object) whose functions are marked with `@hookimpl`. An implementation may leave out
arguments it does not need. Importing a plugin must import no torch: name functions as `"module:function"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pluggy

from relax_cli.config.schema import Config
from relax_cli.errors import Problem
from relax_cli.plugin.graph import ServiceGraph
from relax_cli.plugin.launch_plan import LaunchPlan
from relax_cli.plugin.records import Curriculum, Env, Estimator, Normalized, Reward
from relax_cli.plugin.trackers import Tracker

PROJECT = "relax"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def relax_estimators() -> list[Estimator]:  # type: ignore[empty-body]
    """Estimators this plugin provides."""


@hookspec
def relax_service_graph(config: Config, graph: ServiceGraph) -> ServiceGraph:  # type: ignore[empty-body]
    """The roles and queue fields of a run; called only for the plugin of the chosen estimator."""


@hookspec
def relax_normalize_config(config: Config) -> Normalized:  # type: ignore[empty-body]
    """Set options that only one value makes sense for; called only for the plugin of the chosen estimator."""


@hookspec
def relax_check_config(config: Config) -> list[Problem]:  # type: ignore[empty-body]
    """Rules of this estimator, all findings together; called only for the plugin of the chosen estimator."""


@hookspec(firstresult=True)
def relax_launch(plan: LaunchPlan) -> Any:
    """Start the workers of a run and return the session, or None to leave that to others."""


@hookspec
def relax_rewards() -> list[Reward]:  # type: ignore[empty-body]
    """Named reward functions this plugin provides."""


@hookspec
def relax_envs() -> list[Env]:  # type: ignore[empty-body]
    """Named environments of multi-turn episodes this plugin provides."""


@hookspec
def relax_curriculums() -> list[Curriculum]:  # type: ignore[empty-body]
    """Named curriculums this plugin provides, for `--curriculum`."""


@hookspec
def relax_trackers() -> list[Tracker]:  # type: ignore[empty-body]
    """Named trackers this plugin provides, for `--track`."""


@hookspec
def relax_step_end(step: int, metrics: Mapping[str, float], config: Config, run_dir: Path) -> None:
    """Called after every step with its metrics; `run_dir` is the folder of the run."""
