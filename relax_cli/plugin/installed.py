"""What is known about an installed plugin, and whether what it names can be loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Literal, TypeVar

import pluggy

from relax_cli.errors import ConfigError, Problem
from relax_cli.plugin.apart import Unanswered, run_apart
from relax_cli.plugin.records import REFERENCE, Env, Estimator, Record, env_fault, load_reference

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class PluginRow:
    """One line of `relax plugins list`."""

    name: str
    kind: str
    """The first that fits of `estimator`, `reward`, `env`, `curriculum`, `tracker`, `launcher`; empty when unknown."""
    distribution: str
    version: str
    status: Literal["ok", "broken"]
    reason: str
    """Why it is broken."""
    hooks: tuple[str, ...]


@dataclass(frozen=True)
class Plugin:
    """One plugin with all it provides."""

    row: PluginRow
    entry: EntryPoint
    module: Any = None
    """The loaded module or object; None when the plugin is broken."""
    hook: pluggy.HookRelay | None = None
    """Calls the hooks of this plugin alone; None when the plugin is broken."""
    misspelt: tuple[Problem, ...] = ()
    """One problem for each hook that does not exist."""
    records: tuple[Record, ...] = ()
    """Everything named that it provides."""
    where: str = ""
    """`file:line` of the code that failed, where that is known."""
    others: tuple[Plugin, ...] = ()
    """The other plugins, each without its own `others`."""

    @property
    def estimators(self) -> list[Estimator]:
        """Those that it provides."""
        return self.of(Estimator)

    @property
    def is_ours(self) -> bool:
        """Whether it comes with relax: such code is not under suspicion."""
        return self.row.distribution == "relax-cli"

    def of(self, kind: type[R]) -> list[R]:
        """The records of one kind."""
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def title(self) -> str:
        """For messages: `'mine' (relax-mine)`."""
        return f"{self.row.name!r} ({self.row.distribution})"


def broken_references(plugin: Plugin, records: Sequence[Record] | None = None) -> list[Problem]:
    """What these records of a plugin, or all of them, name and cannot be loaded: tried in a process of its own."""
    chosen = plugin.records if records is None else records
    references = [(getattr(record, field), record.title) for record in chosen for field in record.references]
    if not references:
        return []
    what = f"what plugin {plugin.title} refers to"
    try:
        return run_apart(f"{__name__}:load_all", sys.path, references, what=what)
    except Unanswered as error:
        got, expected = ", ".join(reference for reference, _ in references), "modules that can be imported"
        fix = f"update or remove {plugin.row.distribution}"
        return [REFERENCE(f"{what} {error}", got=got, expected=expected, fix=fix)]


def load_all(path: list[str], references: list[tuple[str, str]]) -> None:
    """The part of `broken_references` in the other process. Raises ConfigError: one problem for each that is broken."""
    sys.path[:] = path
    problems: list[Problem] = []
    for reference, owner in references:
        try:
            loaded = load_reference(reference, owner)
            if owner.startswith(Env.what) and (fault := env_fault(loaded)):
                fix = "make it a class with reset(row) and step(response) that is made without arguments"
                problems.append(REFERENCE(f"{owner} cannot be used", got=f"{reference}: {fault}", fix=fix))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
