"""What the manager knows of a plugin."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Literal

from relax_cli.errors import Problem
from relax_cli.plugin.records import Estimator, Reward


@dataclass(frozen=True)
class PluginRow:
    """One line of `relax plugins list`."""

    name: str
    kind: str
    """The first that fits of `estimator`, `reward`, `tracker`, `launcher`; empty when unknown."""
    distribution: str
    version: str
    status: Literal["ok", "broken", "disabled"]
    reason: str
    """Why it is not `ok`."""
    hooks: tuple[str, ...]


@dataclass(frozen=True)
class Provided:
    """A record and who provides it."""

    plugin: str
    """`name@distribution`, unlike the plugin's name without a double."""
    distribution: str
    record: Estimator | Reward


@dataclass(frozen=True)
class Plugin:
    """One plugin with all it provides."""

    row: PluginRow
    entry: EntryPoint
    module: Any
    """The loaded module or object; None unless the row is `ok`."""
    misspelt: tuple[Problem, ...]
    """One problem for each hook that does not exist."""
    estimators: tuple[Estimator, ...]
    rewards: tuple[Reward, ...]
    rivals: tuple[Provided, ...]
    """What the other plugins provide."""
