"""Finds plugins and calls their hooks, each plugin on its own: what breaks in one reaches no other."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

import pluggy

from relax_cli.config.schema import Config
from relax_cli.errors import ConfigError, Problem, RelaxError, RunError
from relax_cli.plugin import hookspecs
from relax_cli.plugin.graph import ServiceGraph, base_graph, completed
from relax_cli.plugin.installed import Plugin, PluginRow, Provided
from relax_cli.plugin.launch_plan import LaunchPlan
from relax_cli.plugin.records import Estimator, Normalized, Reward, unusable

GROUP = "relax.plugins"


_KINDS = {
    "relax_estimators": "estimator",
    "relax_rewards": "reward",
    "relax_step_end": "tracker",
    "relax_launch": "launcher",
}


def installed_plugins() -> list[EntryPoint]:
    """Entry points of all installed plugins, by name; imports none of them."""
    return sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, _distribution(entry)))


def load_plugins(*, disable: Collection[str] = ()) -> Plugins:
    """Import every installed plugin not named in `disable`; a broken one becomes a row that says why."""
    return Plugins(installed_plugins(), disable=disable)


class Plugins:
    """The installed plugins of this process."""

    def __init__(self, entries: Iterable[EntryPoint], *, disable: Collection[str] = ()) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._entries: dict[str, EntryPoint] = {}
        self._rows: list[PluginRow] = []
        self._misspelt: dict[str, list[Problem]] = {}
        for entry in entries:
            if entry.name in disable:
                self._entries[f"{entry.name}@{_distribution(entry)}"] = entry
                self._rows.append(_row(entry, "disabled", "switched off"))
            else:
                self._load(entry)
        provided = [
            *self._collect("relax_estimators", Estimator),
            *self._collect("relax_rewards", Reward),
        ]
        working = [item for item in provided if self._manager.has_plugin(item.plugin)]
        self._estimators = [item for item in working if isinstance(item.record, Estimator)]
        self._rewards = [item for item in working if isinstance(item.record, Reward)]

    # -- what is there -----------------------------------------------------------------------------

    def rows(self) -> list[PluginRow]:
        """All plugins, broken and disabled ones too, by name."""
        return sorted(self._rows, key=lambda row: (row.name, row.distribution))

    def check_pending(self) -> list[Problem]:
        """One problem for every hook that a plugin misspelt; that plugin's row is `broken`."""
        return [problem for problems in self._misspelt.values() for problem in problems]

    def plugin(self, row: PluginRow) -> Plugin:
        """Everything that is known about the plugin of a row, whatever its status."""
        key = f"{row.name}@{row.distribution}"
        provided = [item for item in (*self._estimators, *self._rewards) if item.plugin == key]
        return Plugin(
            row=row,
            entry=self._entries[key],
            module=self._manager.get_plugin(key),
            misspelt=tuple(self._misspelt.get(key, ())),
            estimators=tuple(item.record for item in provided if isinstance(item.record, Estimator)),
            rewards=tuple(item.record for item in provided if isinstance(item.record, Reward)),
            rivals=tuple(item for item in (*self._estimators, *self._rewards) if item.plugin != key),
        )

    def named(self, name: str) -> list[Plugin]:
        """The plugins of that name, or else those that provide an estimator of that name; more than one only where
        distributions clash.

        Raises:
            ConfigError: there is none; gives the nearest name.
        """
        found = [self.plugin(row) for row in self.rows()]
        matches = [plugin for plugin in found if plugin.row.name == name]
        matches = matches or [plugin for plugin in found if name in {e.name for e in plugin.estimators}]
        if matches:
            return matches
        names = [row.name for row in self.rows()]
        near = difflib.get_close_matches(name, names, n=1)
        raise ConfigError(
            Problem(
                id="unknown-plugin",
                message=f"no plugin {name!r} is installed",
                got=name,
                expected=f"one of {', '.join(names)}",
                fix=f"use {near[0]}" if near else f"install the package that provides it, or relax plugins new {name}",
            )
        )

    def estimators(self) -> dict[str, Estimator]:
        """All estimators by name.

        Raises:
            ConfigError: two plugins claim one name; names both distributions.
        """
        return _by_name(self._estimators, "estimator")

    def rewards(self) -> dict[str, Reward]:
        """All rewards of plugins by name.

        Raises:
            ConfigError: two plugins claim one name; names both distributions.
        """
        return _by_name(self._rewards, "reward")

    def estimator(self, name: str, *, node: str | None = None) -> Estimator:
        """The estimator of that name; `node` names the machine in the error, where it is not the user's own.

        Raises:
            ConfigError: no working plugin provides it; gives the nearest name, or why its plugin is broken.
        """
        known = self.estimators()
        if name in known:
            return known[name]
        row = next((row for row in self._rows if row.name == name and row.status != "ok"), None)
        here = f" on node {node}" if node else ""
        origins = [f"{item.record.name} ({item.distribution})" for item in self._estimators]
        if row is not None:
            message = f"the plugin {name!r} ({row.distribution} {row.version}) is {row.status}{here}: {row.reason}"
            fix = f"reinstall or update {row.distribution}; see `relax plugins list`"
        else:
            near = difflib.get_close_matches(name, known, n=1)
            message = f"no installed plugin provides the estimator {name!r}{here}"
            fix = f"--advantage-estimator {near[0]}" if near else "install the package that provides it"
        raise ConfigError(
            Problem(
                id="unknown-estimator",
                message=message,
                option="--advantage-estimator",
                got=name,
                expected=f"one of {', '.join(sorted(origins))}",
                fix=fix,
            )
        )

    # -- hooks of the chosen estimator -------------------------------------------------------------

    def service_graph(self, config: Config) -> ServiceGraph:
        """Roles and queue fields of a run: what the estimator's plugin says, completed by what every run needs.

        Raises:
            ConfigError: unknown estimator, its plugin failed, or a role would wait for a field nobody writes.
        """
        changed = self._call_chosen("relax_service_graph", config, graph=base_graph())
        graph = completed(base_graph() if changed is None else changed, config.algorithm)
        if problems := graph.problems():
            raise ConfigError(problems)
        return graph

    def normalize(self, config: Config) -> Normalized:
        """The configuration as the chosen estimator wants it, with every change and its reason.

        Raises:
            ConfigError: unknown estimator, or its plugin failed.
        """
        normalized: Normalized | None = self._call_chosen("relax_normalize_config", config)
        return Normalized(config) if normalized is None else normalized

    def check(self, config: Config) -> list[Problem]:
        """What the chosen estimator finds wrong; its plugin failing is a problem of its own.

        Raises:
            ConfigError: unknown estimator.
        """
        self.estimator(config.algorithm.advantage_estimator)
        try:
            found: list[Problem] | None = self._call_chosen("relax_check_config", config)
        except ConfigError as error:
            return list(error.problems)
        return list(found or ())

    # -- hooks of every plugin ---------------------------------------------------------------------

    def launch(self, plan: LaunchPlan) -> Any:
        """The running session of the first plugin that takes the plan; None when none does.

        Raises:
            RelaxError: the launch failed; where the plugin itself is to blame, a `RunError` that names it.
        """
        for key in self._registered():
            try:
                session = self._caller(key, "relax_launch")(plan=plan)
            except RelaxError:
                raise
            except Exception as error:
                raise RunError(self._failure(key, "relax_launch", error)) from error
            if session is not None:
                return session
        return None

    def step_end(self, step: int, metrics: Mapping[str, float]) -> list[Problem]:
        """Tell every plugin that a step ended; returns a warning for each one that failed."""
        failures = []
        for key in self._registered():
            try:
                self._call(key, "relax_step_end", step=step, metrics=metrics)
            except Exception as error:  # noqa: BLE001 a tracker must not end the run
                failures.append(self._failure(key, "relax_step_end", error, severity="warning"))
        return failures

    # -- inside ------------------------------------------------------------------------------------

    def _registered(self) -> list[str]:
        """Keys (`name@distribution`) of the plugins in service."""
        return [key for key in self._entries if self._manager.has_plugin(key)]

    def _load(self, entry: EntryPoint) -> None:
        # Two distributions may use one plugin name; that is refused where they also claim one estimator.
        key = f"{entry.name}@{_distribution(entry)}"
        self._entries[key] = entry
        try:
            self._manager.register(entry.load(), name=key)
        except (Exception, SystemExit) as error:  # noqa: BLE001 anything; the row says what
            self._drop(key, f"{type(error).__name__}: {error}")
            return
        if unknown := self._unknown_hooks(key):
            self._misspelt[key] = unknown
            self._drop(key, "; ".join(problem.message for problem in unknown))
            return
        self._rows.append(_row(entry, "ok", "", self._hooks(key)))

    def _drop(self, key: str, reason: str) -> None:
        """Take a plugin out of service and leave one row that says why."""
        if self._manager.has_plugin(key):
            self._manager.unregister(name=key)
        broken = _row(self._entries[key], "broken", reason)
        kept = [row for row in self._rows if (row.name, row.distribution) != (broken.name, broken.distribution)]
        self._rows = [*kept, broken]

    def _hooks(self, key: str) -> tuple[str, ...]:
        callers = self._manager.get_hookcallers(self._manager.get_plugin(key)) or []
        return tuple(sorted(caller.name for caller in callers))

    def _unknown_hooks(self, key: str) -> list[Problem]:
        """Every misspelt hook of this plugin, where pluggy's own check_pending stops at the first one."""
        plugin = self._manager.get_plugin(key)
        known = [hook for hook in vars(hookspecs) if hook.startswith("relax_")]
        problems = []
        for caller in self._manager.get_hookcallers(plugin) or []:
            optional = all(impl.optionalhook for impl in caller.get_hookimpls() if impl.plugin is plugin)
            if caller.has_spec() or optional:
                continue
            near = difflib.get_close_matches(caller.name, known, n=1)
            problems.append(
                Problem(
                    id="plugin-unknown-hook",
                    message=f"plugin {self._entries[key].name!r} implements {caller.name!r}: no such hook",
                    got=caller.name,
                    expected=", ".join(known),
                    fix=f"rename it to {near[0]}" if near else "remove it, or update relax",
                )
            )
        return problems

    def _call(self, key: str, hook: str, **arguments: Any) -> Any:
        """What one plugin returns from one hook; None when it does not implement it."""
        results = self._caller(key, hook)(**arguments)
        return results[0] if results else None

    def _caller(self, key: str, hook: str) -> pluggy.HookCaller:
        """A hook as if no other plugin implemented it."""
        plugin = self._manager.get_plugin(key)
        others = [other for other in self._manager.get_plugins() if other is not plugin]
        return self._manager.subset_hook_caller(hook, remove_plugins=others)

    def _call_chosen(self, hook: str, config: Config, **arguments: Any) -> Any:
        estimator = self.estimator(config.algorithm.advantage_estimator)
        key = next(item.plugin for item in self._estimators if item.record is estimator)
        try:
            return self._call(key, hook, config=config, **arguments)
        except RelaxError:
            raise
        except Exception as error:
            raise ConfigError(self._failure(key, hook, error)) from error

    def _collect(self, hook: str, kind: type[Any]) -> list[Provided]:
        """What all plugins return from a hook; one that fails becomes a broken row."""
        found = []
        for key in self._registered():
            try:
                records = list(self._call(key, hook) or ())
            except Exception as error:  # noqa: BLE001 the row says what
                self._drop(key, f"{hook} raised {type(error).__name__}: {error}")
                continue
            if not all(isinstance(record, kind) for record in records):
                self._drop(key, f"{hook} must return a list of {kind.__name__}, got {records!r}")
                continue
            if reason := next(filter(None, (unusable(r) for r in records if isinstance(r, Estimator))), ""):
                self._drop(key, reason)
                continue
            found += [Provided(key, _distribution(self._entries[key]), record) for record in records]
        return found

    def _failure(
        self, key: str, hook: str, error: Exception, severity: Literal["error", "warning"] = "error"
    ) -> Problem:
        name, owner = self._entries[key].name, _distribution(self._entries[key])
        return Problem(
            id="plugin-failed",
            message=f"plugin {name!r} ({owner}) failed in {hook}",
            got=f"{type(error).__name__}: {error}",
            expected="the hook returns",
            fix=f"update or remove {owner}; RELAX_DEBUG=1 shows the traceback",
            severity=severity,
        )


def _by_name(provided: list[Provided], what: str) -> dict[str, Any]:
    owners: dict[str, Provided] = {}
    for item in provided:
        name = item.record.name
        if name in owners:
            first = owners[name].distribution
            raise ConfigError(
                Problem(
                    id=f"duplicate-{what}",
                    message=f"{first} and {item.distribution} both provide the {what} {name!r}",
                    got=f"{first}, {item.distribution}",
                    expected="one package",
                    fix=f"uninstall one of them: pip uninstall {item.distribution}",
                )
            )
        owners[name] = item
    return {name: item.record for name, item in owners.items()}


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "unknown"


def _row(
    entry: EntryPoint, status: Literal["ok", "broken", "disabled"], reason: str, hooks: tuple[str, ...] = ()
) -> PluginRow:
    kind = next((kind for hook, kind in _KINDS.items() if hook in hooks), "")
    version = entry.dist.version if entry.dist is not None else ""
    return PluginRow(entry.name, kind, _distribution(entry), version, status, reason, hooks)
