"""What is known about an installed plugin."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Literal, TypeVar

import pluggy

from relax_cli.errors import Problem
from relax_cli.plugin.records import Estimator, Record

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
