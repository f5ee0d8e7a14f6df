"""Everything that is known about a run before anything starts: what `train`, `validate-config`, `--dry-run` and
`quickstart` ask, so that all say the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from relax_cli.checkpoint.resume import ResumeReport
from relax_cli.config.layers import Layers, known, with_paths
from relax_cli.config.model import flag
from relax_cli.config.placement import has_counts
from relax_cli.config.redact import config_dump, hide, secrets_of
from relax_cli.config.schema import Config
from relax_cli.data.rewards import BUILTIN_REWARDS
from relax_cli.data.sources import source_of
from relax_cli.errors import ConfigError, Problem, ResumeError, is_about_machine
from relax_cli.models.hub import PREFIX, is_hub_model, model_folder, pinned
from relax_cli.plugin.graph import ServiceGraph
from relax_cli.plugin.manager import Plugins
from relax_cli.plugin.records import Change
from relax_cli.preflight.inputs import RunInputs, read_inputs, read_model
from relax_cli.preflight.machine import Machine, usable_cores
from relax_cli.preflight.plan import Plan, build_plan, plan_dict
from relax_cli.preflight.resolve import Resolved, command_words, resolve
from relax_cli.preflight.rules import RuleContext, run_rules
from relax_cli.preflight.start import examine_run

PLACES = frozenset({"load", "save", "critic_load", "critic_save", "run_dir", "max_restarts"})
"""Options that say where and how a run lives, not what it computes."""


@dataclass(frozen=True, kw_only=True)
class CheckedRun(Resolved):
    """A configuration and everything that is known about its run. Its problems are also those of its files, and of the
    checkpoints it would resume from; errors first; with `--strict` all are errors."""

    command: tuple[str, ...]
    """See `command_words`."""
    inputs: RunInputs = field(default_factory=RunInputs)
    notes: tuple[Problem, ...] = ()
    """What this machine lacks, where that is not held against the configuration."""
    start: ResumeReport | None = None
    """Where the run starts; None where that was not looked at."""
    plan: Plan | None = None

    @property
    def errors(self) -> tuple[Problem, ...]:
        """What stands in the way of a run."""
        return tuple(p for p in self.problems if p.severity == "error")

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """What is allowed, but worth knowing."""
        return tuple(p for p in self.problems if p.severity == "warning")

    @property
    def config_hash(self) -> str:
        """sha256 of what the run computes: every option except those of `PLACES`, and no secret, which may change."""
        values = {
            f"{section}.{name}": value
            for section, body in config_dump(self.config).items()
            for name, value in body.items()
            if name not in PLACES
        }
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def dump(self, config: Config | None = None) -> dict[str, Any]:
        """JSON object of this configuration, or of `config`, its completed form; no secrets."""
        return {
            "config": config_dump(self.config if config is None else config),
            "origins": self.origins,
            "changes": [asdict(change) for change in self.changes],
        }

    def require_valid(self) -> CheckedRun:
        """This run, if it may start. Raises ResumeError where only the checkpoints stand in the way, else ConfigError,
        with every problem, warnings included."""
        if not self.errors:
            return self
        refusals = () if self.start is None else self.start.problems
        raise (ResumeError if set(self.errors) <= set(refusals) else ConfigError)(self.problems)


def check_run(
    plugins: Plugins,
    layers: Layers,
    *,
    skip_files: bool = False,
    here: bool = True,
    progress: Callable[[str, float], None] | None = None,
    cluster_gpus: Callable[[], int] | None = None,
) -> CheckedRun:
    """Check a run as a whole: its configuration, files, machine, checkpoints and plan.
    Raises ConfigError: two plugins claim one name, so that there are no options at all.

    Args:
        skip_files: leave out what needs the model and data files, the checkpoints or this machine.
        here: what this machine lacks is a problem, not a note.
        progress: told now and then which file is being read, and the part of it that is read.
        cluster_gpus: see `settle_device`.
    """
    machine = Machine()
    resolved = resolve(plugins, layers, None if skip_files else machine, cluster_gpus)
    config, changes, hub_problems = resolved.config, list[Change](), list[Problem]()
    if not skip_files:
        config, changes, hub_problems = from_hub(config, online=here)
    rewards = frozenset({*BUILTIN_REWARDS, *plugins.rewards()})
    inputs = RunInputs() if skip_files else read_inputs(config, progress, rewards)
    named = (frozenset(plugins.envs()), plugins.curriculums(), plugins.trackers())
    context = RuleContext(config, inputs, machine, rewards, *named)
    problems = [*resolved.problems, *hub_problems, *run_rules(context, skip_files=skip_files)]
    if not skip_files:
        problems += known(lambda: plugins.broken_references(config)) or []
    notes = [p for p in problems if is_about_machine(p)]
    problems = [p for p in problems if not is_about_machine(p)]
    graph, start, plan = resolved.graph, None, None
    if graph is not None:
        has_critic, planned, seen = "critic" in graph, with_paths(config, resolved.unread), inputs
        if not skip_files:
            start = known(lambda: examine_run(config, has_critic=has_critic, num_rollout=inputs.rollouts(config)))
        if not skip_files and "hf_checkpoint" in resolved.unread:
            # A model folder whose path is not known has a last part, which may be that of a model that is.
            seen = replace(inputs, model=known(lambda: read_model(planned).model))
        plan = known(lambda: _plan(planned, graph, seen, machine, start))
    problems, notes = (problems + notes, []) if here else (problems, notes)
    problems = shown(problems, resolved, is_strict=bool(known(lambda: config.run.strict)))
    if start is not None:
        problems = [*start.problems, *problems, *start.warnings]
    in_order = tuple(sorted(dict.fromkeys(problems), key=lambda p: p.severity != "error"))
    return CheckedRun(
        **vars(resolved) | {"config": config, "changes": (*resolved.changes, *changes), "problems": in_order},
        command=command_words(layers, type(config)),
        inputs=inputs,
        notes=tuple(shown(notes, resolved, is_strict=False)),
        start=start,
        plan=plan,
    )


def _plan(
    config: Config, graph: ServiceGraph, inputs: RunInputs, machine: Machine, start: ResumeReport | None
) -> Plan | None:
    if not has_counts(config) or not set(graph.names) <= config.parallel.resource.keys():
        return None
    first = 0 if start is None else start.decision.iteration or 0
    plan = build_plan(config, graph.roles, inputs, machine, cores=usable_cores(), first_rollout=first)
    plan_dict(plan)  # What it shows is read now: where an option cannot be, there is no plan.
    return plan


def shown(problems: Sequence[Problem], resolved: Resolved, *, is_strict: bool) -> list[Problem]:
    """Problems ready to be shown: located, without secrets, and none that only follows from an unread value."""
    secrets = secrets_of(resolved.given)
    unread = {flag(name) for name in resolved.unread}
    kept = (p for p in dict.fromkeys(problems) if p.option not in unread or p in resolved.problems)
    judged = (replace(p, severity="error") if is_strict else p for p in kept)
    return [hide(resolved.locate(p), secrets) for p in judged]


T = TypeVar("T")


def from_hub(config: Config, *, online: bool) -> tuple[Config, list[Change], list[Problem]]:
    """The configuration with the folder of a model of the hub, and with the commits of its data sets. `online`: what is
    not in the cache is downloaded, and data sets are pinned; else the model is only looked for in the cache."""
    changes: list[Change] = []
    problems: list[Problem] = []

    def tried(get: Callable[[], T]) -> T | None:
        try:
            return get()
        except ConfigError as error:
            problems.extend(error.problems)
        return None

    name = known(lambda: config.model.hf_checkpoint) or ""
    folder = tried(lambda: model_folder(name, online=online)) if is_hub_model(name) else None
    if not online:
        # A rule says that there is no such folder.
        problems.clear()
    if folder is not None:
        changes.append(Change("--hf-checkpoint", name, str(folder), "the model's place in the cache of the hub"))
        config = config.model_copy(update={"model": config.model.model_copy(update={"hf_checkpoint": str(folder)})})
    items = known(lambda: config.data.prompt_data) or ()
    if online and any(item.startswith(PREFIX) for item in items):
        new = tuple(_pinned(item, tried) for item in items)
        if new != items:
            changes.append(Change("--prompt-data", items, new, "every process reads the same commit"))
            config = config.model_copy(update={"data": config.data.model_copy(update={"prompt_data": new})})
    return config, changes, problems


def _pinned(item: str, tried: Callable[[Callable[[], str]], str | None]) -> str:
    if not item.startswith(PREFIX):
        return item
    place = tried(lambda: source_of(item).place) or item
    commit = tried(lambda: pinned(place))
    return item if commit is None else commit + item.removeprefix(place)
