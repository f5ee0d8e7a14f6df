"""Whether what a plugin names as `"module:function"` can be loaded: tried in a process of its own, with a deadline."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from relax_cli.errors import ConfigError, Problem
from relax_cli.plugin.apart import Unanswered, run_apart
from relax_cli.plugin.installed import Plugin
from relax_cli.plugin.records import REFERENCE, Env, Record, env_fault, load_reference


def broken_references(plugin: Plugin, records: Sequence[Record] | None = None) -> list[Problem]:
    """What these records of a plugin, or all of them, name and cannot be loaded."""
    chosen = plugin.records if records is None else records
    references = [(getattr(record, field), record.title) for record in chosen for field in record.references]
    if not references:
        return []
    try:
        return run_apart(f"{__name__}:load_all", json.dumps([sys.path, references]))
    except Unanswered as error:
        names = ", ".join(reference for reference, _ in references)
        return [
            REFERENCE(
                f"what plugin {plugin.title} refers to {error}",
                got=names,
                expected="modules that can be imported",
                fix=f"update or remove {plugin.row.distribution}",
            )
        ]


def load_all(asked: str) -> None:
    """The part of `broken_references` that runs in the other process.
    Raises ConfigError: has one problem for each reference that cannot be loaded."""
    path, references = json.loads(asked)
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
