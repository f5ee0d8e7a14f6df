"""`relax plugins`: what is installed, what is broken, whether an estimator keeps the rules, and how to begin one."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_cli.cli.console import Output, path_option
from relax_cli.cli.text import shown_default
from relax_cli.config.model import flag, options_by_name
from relax_cli.config.redact import scrubbed
from relax_cli.config.schema import Config
from relax_cli.config.text import table, with_program
from relax_cli.errors import ExitCode
from relax_cli.plugin.installed import Plugin, broken_references
from relax_cli.plugin.manager import Plugins, installed_plugins
from relax_cli.plugin.records import Curriculum, Env, Estimator, Record, Reward
from relax_cli.plugin.scaffold import Kind, write_package
from relax_cli.plugin.trackers import Tracker

if TYPE_CHECKING:
    from relax_cli.plugin.kit.findings import CheckResult

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="a plugin or an estimator; `relax plugins list` shows them",
        autocompletion=lambda: [entry.name for entry in installed_plugins()],
    ),
]
NewName = Annotated[str, typer.Argument(metavar="NAME", help="of the plugin: lower-case letters, digits and _")]
KindOption = Annotated[Kind, typer.Option("--kind", help="what the package provides")]
Directory = Annotated[Path | None, path_option("--dir", "new or empty folder [default: relax-NAME]")]
SHOWN: dict[str, tuple[type[Record], str]] = {
    "rewards": (Reward, "function"),
    "envs": (Env, "class"),
    "curriculums": (Curriculum, "function"),
    "trackers": (Tracker, "opens"),
}
"""What `relax plugins show` has besides estimators, and what it calls the place of their code."""


def list_plugins(output: Output, plugins: Plugins) -> None:
    """List every plugin found, broken ones with the reason."""
    rows = [_row(plugin) for plugin in plugins.installed()]
    columns = ("name", "kind", "distribution", "version", "status", "reason")
    text = table(columns, [[str(row[c] or "") for c in columns] for row in rows])
    output.result(rows, text)


def show_plugin(output: Output, plugins: Plugins, name: Name) -> None:
    """Show what a plugin provides: summary, paper, options with defaults, where the math is."""
    shown = [describe(plugin) for plugin in plugins.named(name)]
    output.result({"name": name, "plugins": shown}, "\n\n".join(_page(data) for data in shown))


def check_plugin(output: Output, plugins: Plugins, name: Name) -> ExitCode:
    """Run the conformance kit on a plugin; exits 1 when it breaks a rule."""
    found = plugins.named(name)
    output.note(f"checking {name}")
    # The kit imports torch.
    from relax_cli.data.envs.kit import check_env
    from relax_cli.plugin.kit import check_plugin as run_checks

    results = [result for plugin in found for result in run_checks(plugin)]
    results += [check_env(env) for plugin in found for env in plugin.of(Env)]
    ok = all(result.status != "failed" for result in results)
    output.result({"ok": ok, "name": name, "checks": [asdict(r) for r in results]}, _verdict(name, results))
    return ExitCode.OK if ok else ExitCode.FAILED


def new_plugin(
    output: Output, plugins: Plugins, name: NewName, kind: KindOption = "estimator", directory: Directory = None
) -> None:
    """Write a complete package to start from: the formula or the reward, entry point, tests."""
    folder = Path(f"relax-{name}") if directory is None else directory
    taken = {
        provided: plugin.row.distribution
        for plugin in plugins.installed()
        for provided in [plugin.row.name, *(record.name for record in plugin.records)]
    }
    written = write_package(name, folder, taken=taken, kind=kind)
    chosen = {
        "estimator": "--advantage-estimator",
        "reward": "--label-key label --rm-type",
        "env": "--label-key label --env",
        "curriculum": "--curriculum",
    }[kind]
    commands = (f"relax plugins check {name}", f"relax train {chosen} {name} ...")
    steps = [f"pip install -e {shlex.quote(str(folder))}", *map(with_program, commands)]
    data = {"ok": True, "name": name, "dir": str(folder), "files": [str(path) for path in written], "next": steps}
    output.result(data, "\n".join([*(f"wrote {path}" for path in written), "next:", *(f"  {s}" for s in steps)]))


SUB_COMMANDS = {"list": list_plugins, "show": show_plugin, "check": check_plugin, "new": new_plugin}


def _row(plugin: Plugin) -> dict[str, Any]:
    """The row of a plugin, `broken` also where what it refers to cannot be loaded."""
    row = plugin.row
    if row.status == "ok" and not plugin.is_ours:
        reasons = [f"{problem.message}: {problem.got.splitlines()[0]}" for problem in broken_references(plugin)]
        row = replace(row, status="broken", reason="; ".join(reasons)) if reasons else row
    # A reason is the text of an exception in user code.
    return asdict(row) | {"reason": scrubbed(row.reason)}


def describe(plugin: Plugin) -> dict[str, Any]:
    """Everything a person wants to know of a plugin, as JSON data. Imports none of its math."""
    return {
        **asdict(plugin.row),
        "module": plugin.entry.value,
        "where": plugin.where,
        "estimators": [_describe_estimator(estimator) for estimator in plugin.estimators],
        **{key: [asdict(record) for record in plugin.of(kind)] for key, (kind, _) in SHOWN.items()},
    }


def _describe_estimator(estimator: Estimator) -> dict[str, Any]:
    core = options_by_name(Config)
    options = []
    for name, own in estimator.options.model_fields.items():
        section, field = core.get(name, (estimator.name, own))
        default = field.get_default(call_default_factory=True)
        options.append(
            {"flag": flag(name), "key": f"{section}.{name}", "default": default, "help": field.description or ""}
        )
    return {
        **vars(estimator),
        "advantages": _location(estimator.advantages),
        "policy_loss": _location(estimator.policy_loss),
        "options": options,
    }


def _location(reference: str) -> dict[str, Any]:
    """Where a `"module:function"` is, read from its source: importing it would import torch."""
    module, _, function = reference.partition(":")
    file, lines = None, list[int]()
    with suppress(ImportError, ValueError, OSError):
        if (spec := find_spec(module)) is not None and spec.origin:
            texts = Path(spec.origin).read_text("utf-8").splitlines()
            file, lines = spec.origin, [n for n, text in enumerate(texts, 1) if text.startswith(f"def {function}(")]
    return {"reference": reference, "file": file, "line": lines[0] if lines else None}


def _page(data: dict[str, Any]) -> str:
    lines = [f"{data['name']}  {data['distribution']} {data['version']}  {data['status']}".rstrip()]
    lines += [f"  {name:<12} {data[name]}" for name in ("reason", "where") if data[name]]
    lines += [f"  module       {data['module']}", f"  hooks        {', '.join(data['hooks'])}".rstrip()]
    for estimator in data["estimators"]:
        lines += ["", f"estimator {estimator['name']}: {estimator['summary']}", f"  paper        {estimator['paper']}"]
        for part in ("advantages", "policy_loss"):
            place = estimator[part]
            at = ":".join(str(x) for x in (place["file"], place["line"]) if x is not None)
            lines.append(f"  {part:<12} {place['reference']}  {at or '(not found)'}")
        needs = [word for word in ("critic", "groups") if estimator[f"needs_{word}"]]
        lines.append(f"  needs        {', '.join(needs) or 'nothing'}")
        rows = [[f"  {o['flag']}", shown_default(o["default"]), o["help"]] for o in estimator["options"]]
        lines += ["", table(("  option", "default", "meaning"), rows)]
    for key, (kind, called) in SHOWN.items():
        for one in data[key]:
            lines += ["", f"{kind.what} {one['name']}: {one['summary']}"]
            lines.append(f"  {called:<12} {one[kind.references[0]]}")
    return "\n".join(lines)


def _verdict(name: str, results: list[CheckResult]) -> str:
    rows = [[r.check, r.subject, r.status, r.reason or r.rule] for r in results]
    lines = [table(("check", "of", "status", "rule"), rows)]
    for result in results:
        for finding in result.findings:
            lines += ["", f"{result.check} of {result.subject}: {finding.message}", f"  fix       {finding.fix}"]
    failed = sum(result.status == "failed" for result in results)
    applied = sum(result.status != "skipped" for result in results)
    summary = f"breaks {failed} of {applied} rules" if failed else f"keeps all {applied} rules that apply"
    return "\n".join([*lines, "", f"{name} {summary}"])
