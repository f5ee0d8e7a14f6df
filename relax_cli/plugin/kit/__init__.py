"""The conformance kit: what every estimator must satisfy, checked on small batches. `relax plugins check NAME` runs it.

A plugin's own tests call `assert_conforms("name")`. To check a function that is not installed, build an `Estimator` and
call `check_estimator`. The checks are pure functions in `loss`, `advantages` and `package`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from relax_cli.config.schema import Section
from relax_cli.errors import ConfigError
from relax_cli.plugin.installed import Plugin, broken_references
from relax_cli.plugin.kit import package
from relax_cli.plugin.kit.findings import CheckResult, Finding, Part
from relax_cli.plugin.manager import load_plugins
from relax_cli.plugin.records import Env, Estimator, Record
from relax_cli.plugin.user_code import UserCodeError, user_code

__all__ = ["CheckResult", "Finding", "assert_conforms", "check_estimator", "check_plugin"]


def check_plugin(plugin: Plugin) -> list[CheckResult]:
    """All checks of an installed plugin: the package first, then the math of each of its estimators."""
    results = []
    for check, function in package.CHECKS.items():
        if plugin.row.status != "ok" and check not in ("loads", "hooks"):
            results.append(_skipped(check, plugin.row.distribution, _rule(function), "the plugin does not load"))
        else:
            results.append(_outcome(check, plugin.row.distribution, function, plugin))
    results += [result for estimator in plugin.estimators for result in check_estimator(estimator)]
    named = (record for record in plugin.records if not isinstance(record, Estimator))
    return results + [check_references(plugin, record) for record in named]


def check_references(plugin: Plugin, record: Record) -> CheckResult:
    """Whether what a plugin provides can be loaded, in a process of its own."""
    found = tuple(Finding(problem.got, problem.fix) for problem in broken_references(plugin, [record]))
    rule = f"the {record.what} leads to a {'class' if isinstance(record, Env) else 'function'}"
    return CheckResult("references", record.name, "failed" if found else "ok", rule, found)


def check_estimator(estimator: Estimator, options: Section | None = None) -> list[CheckResult]:
    """All checks of an estimator's advantages and policy loss.

    Args:
        estimator: references to the math must be importable here.
        options: values to check it with; the defaults of its option model when None.
    """
    from relax_cli.plugin.kit import advantages, loss
    from relax_cli.plugin.kit.cases import Subject, subject_of

    references = "references", "advantages and policy_loss lead to functions, and the options have defaults"
    try:
        subject = subject_of(estimator, options)
    except (ConfigError, ValueError, AssertionError) as error:
        fix = 'name an importable "module:function", and give every option a default'
        finding = Finding(str(error), fix)
        return [CheckResult(references[0], estimator.name, "failed", references[1], (finding,))]
    results = [CheckResult(references[0], estimator.name, "ok", references[1])]
    parts: dict[Part, dict[str, Callable[[Subject], list[Finding]]]] = {
        "advantages": advantages.CHECKS,
        "policy_loss": loss.CHECKS,
    }
    for part, checks in parts.items():
        for check, function in checks.items():
            name = f"{part}/{check}"
            if reason := _not_for(estimator, check):
                results.append(_skipped(name, estimator.name, _rule(function), reason))
            else:
                results.append(_outcome(name, estimator.name, function, subject, part))
    return results


def assert_conforms(name: str) -> None:
    """For a plugin's own tests: the installed plugin `name` passes every check.

    Raises:
        AssertionError: it does not; lists every finding with its fix.
        ConfigError: no such plugin is installed.
    """
    results = [result for plugin in load_plugins().named(name) for result in check_plugin(plugin)]
    lines = [
        f"{result.check}: {finding.message}\n  fix: {finding.fix}" for result in results for finding in result.findings
    ]
    assert not lines, f"{name} breaks {len(lines)} rules\n" + "\n".join(lines)


def _not_for(estimator: Estimator, check: str) -> str:
    """Why a check does not apply to an estimator; empty when it does."""
    if check == "ratio-one" and not estimator.ratio_one_is_policy_gradient:
        return "the Estimator says ratio_one_is_policy_gradient=False"
    if check == "groups" and not estimator.needs_groups:
        return "the Estimator says needs_groups=False"
    if check == "row-by-row" and (estimator.needs_groups or not estimator.needs_critic):
        return "without a critic the Actor hands over all rows of a rollout"
    return ""


def _outcome(
    check: str,
    subject: str,
    function: Callable[[Any], list[Finding]],
    argument: Any,
    part: Part = "package",
) -> CheckResult:
    try:
        with user_code(passes=()):
            findings = [replace(finding, part=part) for finding in function(argument)]
    except UserCodeError as error:
        place = f" ({error.place})" if error.place else ""
        findings = [Finding(f"raised {error.reason}{place}", "make it work on such inputs", part)]
    return CheckResult(check, subject, "failed" if findings else "ok", _rule(function), tuple(findings))


def _skipped(check: str, subject: str, rule: str, reason: str) -> CheckResult:
    return CheckResult(check, subject, "skipped", rule, reason=reason)


def _rule(function: Callable[..., Any]) -> str:
    assert function.__doc__ is not None
    return " ".join(function.__doc__.split("\n\n")[0].split()).rstrip(".")
