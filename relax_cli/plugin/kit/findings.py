"""What the conformance kit reports. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Part = Literal["advantages", "policy_loss", "package"]


@dataclass(frozen=True)
class Finding:
    """One way in which a plugin breaks a rule."""

    message: str
    """What was seen, with numbers where there are any."""
    fix: str
    """What to change in the plugin."""
    part: Part = "package"


@dataclass(frozen=True)
class CheckResult:
    """One check of one plugin or estimator."""

    check: str
    """Stable id, kebab-case."""
    subject: str
    """The estimator, or the distribution for checks of the package."""
    status: Literal["ok", "failed", "skipped"]
    rule: str
    """What the check requires, one sentence."""
    findings: tuple[Finding, ...] = ()
    """Empty unless failed."""
    reason: str = ""
    """Why it was skipped."""


def result_of(check: str, subject: str, rule: str, findings: Sequence[Finding]) -> CheckResult:
    """The result of a check that was made."""
    return CheckResult(check, subject, "failed" if findings else "ok", rule, tuple(findings))
