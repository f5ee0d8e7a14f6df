"""Finds plugins and calls their hooks, each plugin on its own: what breaks in one reaches no other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, TypeVar

import pluggy

from relax_cli.config.names import nearest
from relax_cli.config.schema import Config
from relax_cli.errors import ConfigError, Problem, RunError, problem_kinds
from relax_cli.plugin import hookspecs
from relax_cli.plugin.graph import ServiceGraph, base_graph, completed
from relax_cli.plugin.installed import Plugin, PluginRow, broken_references
from relax_cli.plugin.launch_plan import LaunchPlan
from relax_cli.plugin.records import (
    BUILTIN_CURRICULUMS,
    Curriculum,
    Env,
    Estimator,
    Normalized,
    Record,
    Reward,
    unusable,
)
from relax_cli.plugin.trackers import BUILTIN_TRACKERS, Tracker
from relax_cli.plugin.user_code import UserCodeError, settings_kept, slowness_told, user_code

GROUP = "relax.plugins"
HOOK_SECONDS = 120.0
"""Deadline of a plugin's import and of each of its hooks but the next two."""
TRACKER_SECONDS = 300.0
"""Deadline of `relax_step_end`, which may wait for a server. `relax_launch` may take as long as it likes."""
HOOKS = tuple(name for name in vars(hookspecs) if name.startswith("relax_"))
_RECORDS: dict[str, type[Record]] = {
    f"relax_{kind.__name__.lower()}s": kind for kind in (Estimator, Reward, Env, Curriculum, Tracker)
}
_KINDS = {hook: kind.__name__.lower() for hook, kind in _RECORDS.items()} | {
    "relax_step_end": "tracker",
    "relax_launch": "launcher",
}
R = TypeVar("R", bound=Record)

declare = problem_kinds("Plugins")
UNKNOWN_ESTIMATOR = declare(
    "unknown-estimator",
    "No installed, working plugin provides the estimator of `--advantage-estimator`.",
    option="--advantage-estimator",
)
UNKNOWN_PLUGIN = declare("unknown-plugin", "No plugin of that name is installed.")
DUPLICATE = {
    kind: declare(
        f"duplicate-{kind.__name__.lower()}",
        f"Two packages provide {'an' if kind.what[0] == 'e' else 'a'} {kind.what} of one name; both are named.",
    )
    for kind in _RECORDS.values()
}
PLUGIN_FAILED = declare(
    "plugin-failed", "A hook of a plugin raised an exception or returned something of the wrong type."
)
UNKNOWN_HOOK = declare(
    "plugin-unknown-hook", "A plugin implements a hook that relax does not have, most likely misspelt."
)


def installed_plugins() -> list[EntryPoint]:
    """Entry points of all installed plugins, by name; imports none of them."""
    return sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, _distribution(entry)))


def load_plugins() -> Plugins:
    """Import every installed plugin; a broken one becomes a row that says why."""
    return Plugins(installed_plugins())


class Plugins:
    """The installed plugins of this process. Where two provide one name, looking it up raises a ConfigError that names
    both distributions."""

    def __init__(self, entries: Iterable[EntryPoint]) -> None:
        self._plugins = sorted(map(_load, entries), key=lambda plugin: (plugin.row.name, plugin.row.distribution))

    # -- what is installed -------------------------------------------------------------------------

    def rows(self) -> list[PluginRow]:
        """All plugins by name, broken ones included."""
        return [plugin.row for plugin in self._plugins]

    def installed(self) -> list[Plugin]:
        """Everything that is known about every plugin."""
        return [replace(one, others=tuple(p for p in self._plugins if p is not one)) for one in self._plugins]

    def named(self, name: str) -> list[Plugin]:
        """The plugins of that name, or else those that provide an estimator of that name; more than one only where
        distributions clash.
        Raises ConfigError: there is none; gives the nearest name."""
        known = self.installed()
        if found := [plugin for plugin in known if plugin.row.name == name]:
            return found
        if found := [plugin for plugin in known if name in {e.name for e in plugin.estimators}]:
            return found
        names = [plugin.row.name for plugin in known]
        near = nearest(name, names)
        fix = f"use {near}" if near else f"install the package that provides it, or relax plugins new {name}"
        expected = f"one of {', '.join(names)}"
        raise ConfigError(UNKNOWN_PLUGIN(f"no plugin {name!r} is installed", got=name, expected=expected, fix=fix))

    def estimators(self) -> dict[str, Estimator]:
        """All estimators by name."""
        return self._by_name(Estimator)

    def rewards(self) -> dict[str, Reward]:
        """All rewards of plugins by name."""
        return self._by_name(Reward)

    def envs(self) -> dict[str, Env]:
        """All environments of plugins by name."""
        return self._by_name(Env)

    def curriculums(self) -> dict[str, Curriculum]:
        """All curriculums by name; one of a plugin replaces a built-in one of its name."""
        return BUILTIN_CURRICULUMS | self._by_name(Curriculum)

    def trackers(self) -> dict[str, Tracker]:
        """All trackers by name; one of a plugin replaces a built-in one of its name."""
        return BUILTIN_TRACKERS | self._by_name(Tracker)

    def estimator(self, name: str, *, node: str | None = None) -> Estimator:
        """The estimator of that name; `node` names the machine in the error, where it is not the user's own.
        Raises ConfigError: no working plugin provides it; gives the nearest name, or why its plugin is broken."""
        known = self.estimators()
        if name in known:
            return known[name]
        broken = next((p for p in self._plugins if p.row.name == name and p.row.status == "broken"), None)
        here = f" on node {node}" if node else ""
        if broken is not None:
            row, place = broken.row, f" ({broken.where})" if broken.where else ""
            message = f"the plugin {name!r} ({row.distribution} {row.version}) is broken{here}: {row.reason}{place}"
            fix = f"reinstall or update {row.distribution}; see `relax plugins list`"
        else:
            # Not nearer: dapo, dpo and trpo are other algorithms, not misspelt ones.
            near = nearest(name.lower().replace("0", "o"), known, cutoff=0.85)
            message = f"no installed plugin provides the estimator {name!r}{here}"
            fix = f"--advantage-estimator {near}" if near else "install the package that provides it"
        origins = sorted(f"{e.name} ({plugin.row.distribution})" for plugin in self._plugins for e in plugin.estimators)
        raise ConfigError(UNKNOWN_ESTIMATOR(message, got=name, expected=f"one of {', '.join(origins)}", fix=fix))

    # -- hooks of the chosen estimator -------------------------------------------------------------

    def service_graph(self, config: Config) -> ServiceGraph:
        """Roles and queue fields of a run: what the estimator's plugin says, completed by what every run needs.
        Raises ConfigError: unknown estimator, its plugin failed, or a role would wait for a field that no role
        writes."""
        changed = self._call_chosen("relax_service_graph", ServiceGraph, config, graph=base_graph())
        graph = completed(base_graph() if changed is None else changed, config)
        if problems := graph.problems():
            raise ConfigError(problems)
        return graph

    def normalize(self, config: Config) -> Normalized:
        """The configuration as the chosen estimator wants it, with every change and its reason.
        Raises ConfigError: unknown estimator, or its plugin failed."""
        normalized: Normalized | None = self._call_chosen("relax_normalize_config", Normalized, config)
        return Normalized(config) if normalized is None else normalized

    def check(self, config: Config) -> list[Problem]:
        """What the chosen estimator finds wrong; its plugin failing is a problem of its own.
        Raises ConfigError: unknown estimator."""
        self.estimator(config.algorithm.advantage_estimator)
        try:
            return self._call_chosen("relax_check_config", list, config, of=Problem) or []
        except ConfigError as error:
            return list(error.problems)

    def broken_references(self, config: Config) -> list[Problem]:
        """What the chosen estimator, reward, environment, curriculum and trackers name and cannot be loaded, tried in
        another process. Ours are known to load.
        """
        chosen: dict[type[Record], Collection[str | None]] = {
            Estimator: [config.algorithm.advantage_estimator],
            Reward: dict(config.reward.shares),
            Env: [config.episode.env],
            Curriculum: [config.data.curriculum],
            Tracker: config.run.track,
        }
        return [
            problem
            for plugin, _ in self._working()
            if not plugin.is_ours
            for problem in broken_references(
                plugin, [one for kind, names in chosen.items() for one in plugin.of(kind) if one.name in names]
            )
        ]

    # -- hooks of every plugin ---------------------------------------------------------------------

    def launch(self, plan: LaunchPlan) -> Any:
        """The running session of the first plugin that takes the plan; None when none does.
        Raises RelaxError: the launch failed; where the plugin itself is to blame, a `RunError` that names it."""
        for plugin, hook in self._working():
            try:
                with nullcontext() if plugin.is_ours else user_code():
                    session = hook.relax_launch(plan=plan)
            except UserCodeError as error:
                raise RunError(_failure(plugin, "relax_launch", error)) from error
            if session is not None:
                return session
        return None

    def step_end(
        self, step: int, metrics: Mapping[str, float], config: Config | None = None, run_dir: Path | None = None
    ) -> list[Problem]:
        """Tell every plugin that a step ended; returns a warning for each one that failed. Each gets its own copies."""
        failures = []
        for plugin, hook in self._working():
            try:
                with user_code(passes=(), seconds=TRACKER_SECONDS):
                    own = None if config is None else config.model_copy(deep=True)
                    hook.relax_step_end(step=step, metrics=dict(metrics), config=own, run_dir=run_dir)
            except UserCodeError as error:
                failures.append(replace(_failure(plugin, "relax_step_end", error), severity="warning"))
        return failures

    # -- inside ------------------------------------------------------------------------------------

    def _working(self) -> Iterator[tuple[Plugin, pluggy.HookRelay]]:
        return ((plugin, plugin.hook) for plugin in self._plugins if plugin.hook is not None)

    def _by_name(self, kind: type[R]) -> dict[str, R]:
        owners: dict[str, str] = {}
        found: dict[str, R] = {}
        for plugin in self._plugins:
            for record in plugin.of(kind):
                name, owner = record.name, plugin.row.distribution
                if name in found:
                    what = f"{owners[name]} and {owner} both provide the {kind.__name__.lower()} {name!r}"
                    got, fix = f"{owners[name]}, {owner}", f"uninstall one of them: pip uninstall {owner}"
                    raise ConfigError(DUPLICATE[kind](what, got=got, expected="one package", fix=fix))
                owners[name], found[name] = owner, record
        return found

    def _call_chosen(self, hook: str, kind: type[Any], config: Config, *, of: type[Any] = object, **more: Any) -> Any:
        """What the chosen estimator's plugin returns from a hook: None, or a `kind` (of `of`, if it is a list)."""
        estimator = self.estimator(config.algorithm.advantage_estimator)
        plugin, relay = next((p, h) for p, h in self._working() if any(e is estimator for e in p.estimators))
        try:
            with user_code(seconds=HOOK_SECONDS):
                results = getattr(relay, hook)(config=config.model_copy(deep=True), **more)
                return _of_type(results[0], hook, kind, of) if results else None
        except UserCodeError as error:
            raise ConfigError(_failure(plugin, hook, error)) from error


def _load(entry: EntryPoint) -> Plugin:
    """One plugin behind a hook manager of its own; whatever goes wrong becomes its row."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    provided: list[Record] = []
    doing = ""
    try:
        told = slowness_told(f"the plugin {entry.name!r} ({_distribution(entry)})", HOOK_SECONDS)
        with told, user_code(passes=(), seconds=HOOK_SECONDS), settings_kept():
            module = entry.load()
            manager.register(module)
        if misspelt := _unknown_hooks(entry, manager, module):
            reason = "; ".join(problem.message for problem in misspelt)
            return Plugin(_row(entry, reason=reason), entry, misspelt=misspelt)
        for hook, kind in _RECORDS.items():
            doing = f"{hook} raised "
            with user_code(passes=(), seconds=HOOK_SECONDS), settings_kept():
                results = getattr(manager.hook, hook)()
                found: list[Record] = _of_type(results[0] or [], hook, list, kind) if results else []
                names = [record.name for record in found]
                twice = (f"{hook} returns two called {name!r}" for name in names if names.count(name) > 1)
                reason = next(filter(None, (*map(unusable, found), *twice)), "")
                provided += found
            if reason:
                return Plugin(_row(entry, reason=reason), entry)
    except UserCodeError as error:
        return Plugin(_row(entry, reason=f"{doing}{error.reason}"), entry, where=error.place)
    hooks = tuple(sorted(caller.name for caller in manager.get_hookcallers(module) or ()))
    return Plugin(_row(entry, hooks), entry, module, manager.hook, records=tuple(provided))


def _unknown_hooks(entry: EntryPoint, manager: pluggy.PluginManager, module: Any) -> tuple[Problem, ...]:
    """Every misspelt hook of a plugin, where pluggy's own check_pending stops at the first one."""
    problems = []
    for caller in manager.get_hookcallers(module) or []:
        if caller.has_spec() or all(implementation.optionalhook for implementation in caller.get_hookimpls()):
            continue
        near = nearest(caller.name, HOOKS)
        fix = f"rename it to {near}" if near else "remove it, or update relax"
        what = f"plugin {entry.name!r} implements {caller.name!r}: no such hook"
        problems.append(UNKNOWN_HOOK(what, got=caller.name, expected=", ".join(HOOKS), fix=fix))
    return tuple(problems)


def _of_type(value: Any, hook: str, kind: type[Any], of: type[Any]) -> Any:
    items = [value] if kind is not list else list(value) if isinstance(value, Iterable) else [None]
    if not all(isinstance(item, of if kind is list else kind) for item in items):
        expected = f"a list of {of.__name__}" if kind is list else f"a {kind.__name__}"
        raise TypeError(f"{hook} must return {expected}, got {value!r}")
    return items if kind is list else value


def _failure(plugin: Plugin, hook: str, error: UserCodeError) -> Problem:
    return PLUGIN_FAILED(
        f"plugin {plugin.title} failed in {hook}",
        where=error.place,
        got=error.story,
        expected="the hook returns",
        fix=f"update or remove {plugin.row.distribution}; RELAX_DEBUG=1 shows the traceback",
    )


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "unknown"


def _row(entry: EntryPoint, hooks: tuple[str, ...] = (), reason: str = "") -> PluginRow:
    kind = next((kind for hook, kind in _KINDS.items() if hook in hooks), "")
    version = entry.dist.version if entry.dist is not None else ""
    status: Literal["ok", "broken"] = "broken" if reason else "ok"
    return PluginRow(entry.name, kind, _distribution(entry), version, status, " ".join(reason.split()), hooks)
