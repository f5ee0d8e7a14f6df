"""The conformance kit: what every estimator must satisfy, checked on small batches. `relax plugins check NAME` runs it.

A plugin's own tests call `assert_conforms("name")`. To check a function that is not installed, build an `Estimator` and
call `check_estimator`. The checks are pure functions in `loss`, `advantages` and `package`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from relax_cli.config.schema import Section
from relax_cli.errors import ConfigError
from relax_cli.plugin.installed import Plugin, broken_references
from relax_cli.plugin.kit import package
from relax_cli.plugin.kit.findings import CheckResult, Finding, Part, result_of
from relax_cli.plugin.manager import load_plugins
from relax_cli.plugin.records import Env, Estimator
from relax_cli.plugin.user_code import UserCodeError, user_code

__all__ = ["CheckResult", "Finding", "assert_conforms", "check_estimator", "check_plugin"]


def check_plugin(plugin: Plugin) -> list[CheckResult]:
    """All checks of an installed plugin: the package, the math of each of its estimators, and what else it names."""
    results = []
    for check, function in package.CHECKS.items():
        applies = plugin.row.status == "ok" or check in ("loads", "hooks")
        skipped = "" if applies else "the plugin does not load"
        results.append(_outcome(check, plugin.row.distribution, function, plugin, skipped=skipped))
    results += [result for estimator in plugin.estimators for result in check_estimator(estimator)]
    for record in plugin.records:
        if not isinstance(record, Estimator):
            found = [Finding(problem.got, problem.fix) for problem in broken_references(plugin, [record])]
            rule = f"the {record.what} leads to a {'class' if isinstance(record, Env) else 'function'}"
            results.append(result_of("references", record.name, rule, found))
    return results


def check_estimator(estimator: Estimator, options: Section | None = None) -> list[CheckResult]:
    """All checks of an estimator's advantages and policy loss.

    Args:
        estimator: references to the math must be importable here.
        options: values to check it with; the defaults of its option model when None.
    """
    from relax_cli.plugin.kit import advantages, loss
    from relax_cli.plugin.kit.cases import subject_of

    rule = "advantages and policy_loss lead to functions, and the options have defaults"
    references = partial(result_of, "references", estimator.name, rule)
    try:
        subject = subject_of(estimator, options)
    except (ConfigError, ValueError, AssertionError) as error:
        fix = 'name an importable "module:function", and give every option a default'
        return [references([Finding(str(error), fix)])]
    parts: dict[Part, Any] = {"advantages": advantages.CHECKS, "policy_loss": loss.CHECKS}
    return [references([])] + [
        _outcome(f"{part}/{check}", estimator.name, function, subject, part, skipped=_not_for(estimator, check))
        for part, checks in parts.items()
        for check, function in checks.items()
    ]


def assert_conforms(name: str) -> None:
    """For a plugin's own tests: the installed plugin `name` passes every check.
    Raises AssertionError: it does not; lists every finding with its fix. Raises ConfigError: it is not installed."""
    results = [result for plugin in load_plugins().named(name) for result in check_plugin(plugin)]
    lines = [f"{r.check}: {finding.message}\n  fix: {finding.fix}" for r in results for finding in r.findings]
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
    *,
    skipped: str,
) -> CheckResult:
    assert function.__doc__ is not None
    rule = " ".join(function.__doc__.split("\n\n")[0].split()).rstrip(".")
    if skipped:
        return CheckResult(check, subject, "skipped", rule, reason=skipped)
    try:
        with user_code(passes=()):
            findings = [replace(finding, part=part) for finding in function(argument)]
    except UserCodeError as error:
        place = f" ({error.place})" if error.place else ""
        findings = [Finding(f"raised {error.reason}{place}", "make it work on such inputs", part)]
    return result_of(check, subject, rule, findings)
