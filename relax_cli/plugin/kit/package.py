"""Checks of a plugin as an installed package: it loads, without torch, and takes no one's name. Imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import FunctionType

from relax_cli.errors import ConfigError
from relax_cli.plugin.config_model import config_model
from relax_cli.plugin.hookspecs import PROJECT
from relax_cli.plugin.installed import Plugin
from relax_cli.plugin.kit.findings import Finding

HEAVY = ("torch", "ray", "megatron", "transformers", "sglang", "vllm")
"""What looking at a plugin must not import: `relax --help` would take seconds."""
_TIMEOUT = 120
_FRESH = """
import json, sys
from importlib.metadata import EntryPoint
value, path, heavy = json.loads(sys.argv[1])
sys.path[:] = path
plugin = EntryPoint("fresh", value, "relax.plugins").load()
if hasattr(plugin, "relax_estimators"):
    plugin.relax_estimators()
print()
print(json.dumps(sorted(set(heavy) & set(sys.modules))))
"""


def loads(plugin: Plugin) -> list[Finding]:
    """The plugin is imported and its hooks can be called."""
    if plugin.row.status == "ok" or plugin.misspelt:
        return []
    fix = f"make `import {plugin.entry.module}` and its hooks work"
    return [Finding(f"the plugin is {plugin.row.status}: {plugin.row.reason}", fix)]


def hooks(plugin: Plugin) -> list[Finding]:
    """Every function that looks like a hook is one."""
    found = [Finding(problem.message, problem.fix) for problem in plugin.misspelt]
    for name, value in vars(plugin.module).items() if plugin.module is not None else ():
        if name.startswith("relax_") and isinstance(value, FunctionType) and not hasattr(value, f"{PROJECT}_impl"):
            found.append(Finding(f"{name} is never called: it is not marked", "put @hookimpl in front of it"))
    return found


def fresh_process(plugin: Plugin) -> list[Finding]:
    """A new process imports the plugin and lists its estimators without torch."""
    asked = json.dumps([plugin.entry.value, sys.path, HEAVY])
    try:
        done = subprocess.run(
            [sys.executable, "-c", _FRESH, asked], capture_output=True, encoding="utf-8", timeout=_TIMEOUT, check=True
        )
    except subprocess.TimeoutExpired:
        return [Finding(f"importing it takes longer than {_TIMEOUT} s", "do that work later, where it is needed")]
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip() or f"exit code {error.returncode}").splitlines()[-1]
        return [Finding(f"a new process cannot import it: {reason}", f"make `import {plugin.entry.module}` work alone")]
    if heavy := json.loads(done.stdout.splitlines()[-1]):
        message = f"importing {plugin.entry.module} imports {', '.join(heavy)}"
        return [Finding(message, 'move the math to a module of its own and name it "module:function"')]
    return []


def name_clash(plugin: Plugin) -> list[Finding]:
    """No other package provides an estimator, a reward, a tracker or an option of the same name."""
    taken = [
        f"{other.row.distribution} also provides the {record.what} {record.name!r}"
        for other in plugin.others
        for record in plugin.records
        if (record.what, record.name) in {(theirs.what, theirs.name) for theirs in other.records}
    ]
    if taken:
        return [Finding(message, "choose another name for yours") for message in taken]
    return [Finding(message, "put the estimator's name in front of the option's") for message in _claimed(plugin)]


def options(plugin: Plugin) -> list[Finding]:
    """Every option of an estimator has a help text."""
    return [
        Finding(f"option {name} of {estimator.name} has no help text", "Field(..., description=...)")
        for estimator in plugin.estimators
        for name, field in estimator.options.model_fields.items()
        if not field.description
    ]


def _claimed(plugin: Plugin) -> Iterator[str]:
    others = [estimator for other in plugin.others for estimator in other.estimators]
    for estimator in plugin.estimators:
        for together in ([estimator], *([other, estimator] for other in others)):
            try:
                config_model(together)
            except ConfigError as error:
                yield from (problem.message for problem in error.problems)
                break


CHECKS: dict[str, Callable[[Plugin], list[Finding]]] = {
    "loads": loads,
    "hooks": hooks,
    "fresh-process": fresh_process,
    "options": options,
    "name-clash": name_clash,
}
