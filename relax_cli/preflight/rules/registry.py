"""How a rule declares itself: `@rule(id, theme, …)` above a generator that yields what is wrong.

The docstring of a rule is its text in `docs/rules.md`. Its parameters are named after what it reads: sections of the
configuration (`batch`, `parallel`, …), the whole `config`, or other fields of `RuleContext` (`inputs`, `machine`, …).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isqrt
from typing import Literal

from relax_cli.config.layers import UnreadOption
from relax_cli.config.model import options_by_name
from relax_cli.config.placement import has_counts
from relax_cli.config.redact import redacted
from relax_cli.config.schema import Config
from relax_cli.data.rewards import BUILTIN_REWARDS
from relax_cli.errors import Problem, ProblemKind, Severity, problem_kind
from relax_cli.plugin.records import BUILTIN_CURRICULUMS, Curriculum
from relax_cli.plugin.trackers import BUILTIN_TRACKERS, Tracker
from relax_cli.preflight.inputs import RunInputs
from relax_cli.preflight.machine import Machine
from relax_cli.preflight.plan import MemoryPlan, plan_memory

Needs = Literal["config", "files", "machine"]
"""What a rule looks at besides the configuration: nothing, model and data files, this machine."""


@dataclass(frozen=True)
class RuleContext:
    """Everything that a rule may ask for."""

    config: Config
    """After the plugins' normalisation."""
    inputs: RunInputs = field(default_factory=RunInputs)
    machine: Machine = field(default_factory=Machine)
    rewards: frozenset[str] = frozenset(BUILTIN_REWARDS)
    envs: frozenset[str] = frozenset()
    curriculums: Mapping[str, Curriculum] = field(default_factory=lambda: BUILTIN_CURRICULUMS)
    trackers: Mapping[str, Tracker] = field(default_factory=lambda: BUILTIN_TRACKERS)

    @cached_property
    def memory(self) -> MemoryPlan | None:
        """What the plan says of memory and checkpoints; None where that is not known."""
        return plan_memory(self.config, tuple(self.config.parallel.resource), self.inputs, self.machine)


@dataclass(frozen=True)
class Finding:
    """What a rule found; its kind adds id and severity."""

    message: str = ""
    """Where it is empty, the first sentence of the rule's text says it."""
    fix: str = ""
    got: str | None = None
    """None for the value of the option."""
    expected: str = ""
    option: str | None = None
    """Where it is not the rule's own."""
    where: str = ""


Found = Iterator[Finding | Problem]


@dataclass(frozen=True)
class Rule:
    """One check, and the kind of problem it reports."""

    kind: ProblemKind
    needs: Needs
    check: Callable[..., Found]
    reads: tuple[str, ...]

    def problems(self, context: RuleContext) -> Iterator[Problem]:
        """Everything that is wrong by this rule."""
        sources = (context if name in CONTEXT else context.config for name in self.reads)
        arguments = (getattr(source, name) for source, name in zip(sources, self.reads, strict=True))
        for found in self.check(*arguments):
            problem = found if isinstance(found, Problem) else self.problem(found)
            is_silent = isinstance(found, Finding) and found.got is None
            yield replace(problem, got=_given(context.config, problem.option)) if is_silent else problem

    def problem(self, found: Finding) -> Problem:
        """The finding as a problem of this kind."""
        return self.kind(**vars(found) | {"message": found.message or self._sentence(), "got": found.got or ""})

    def _sentence(self) -> str:
        text = " ".join(self.kind.summary.split()).removeprefix("A warning: ").replace("`", "")
        sentence = text.partition(". ")[0].removesuffix(".")
        is_name = any(map(str.isupper, sentence.split()[0][1:]))
        return sentence if is_name else sentence[0].lower() + sentence[1:]


def _given(config: Config, option: str) -> str:
    """The value of an option as one types it; empty where it is unset."""
    name = option.removeprefix("--").replace("-", "_")
    section, _ = options_by_name(type(config)).get(name, ("", None))
    value = redacted(section, name, getattr(getattr(config, section), name)) if section else None
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


CONTEXT = (*RuleContext.__dataclass_fields__, "memory")
RULES: list[Rule] = []
"""All rules, in the order in which they are asked."""


def rule(
    id: str | ProblemKind, theme: str = "", *, option: str = "", severity: Severity = "error", needs: Needs = "config"
) -> Callable[[Callable[..., Found]], Rule]:
    """Make a rule of a function, which reports a kind of its own, or one that code of a lower layer has declared."""

    def declare(check: Callable[..., Found]) -> Rule:
        assert check.__doc__, f"rule {id} has no docstring"
        reads = tuple(inspect.signature(check).parameters)
        assert set(reads) <= {*CONTEXT, *Config.model_fields}, f"rule {id} reads {reads}"
        kind = (
            id
            if isinstance(id, ProblemKind)
            else problem_kind(id, theme, inspect.cleandoc(check.__doc__), option=option, severity=severity)
        )
        RULES.append(Rule(kind, needs, check, reads))
        return RULES[-1]

    return declare


MOST_TRIED = 10**6


def largest_divisor(count: int, most: int) -> int:
    """The largest divisor of `count` that is not above `most`, or a smaller one where `count` is huge."""
    small = [n for n in range(1, min(isqrt(count), MOST_TRIED) + 1) if count % n == 0]
    return max(n for divisor in small for n in (divisor, count // divisor) if n <= most)


def run_rules(context: RuleContext, *, skip_files: bool = False) -> list[Problem]:
    """Every problem of a configuration; `skip_files`: without the rules that need files or this machine."""
    countable = has_counts(context.config)
    found: list[Problem] = []
    for each in RULES:
        if (skip_files and each.needs != "config") or (each.needs == "machine" and not countable):
            continue
        # A rule about an option whose value could not be read has nothing to judge.
        with suppress(UnreadOption):
            found += each.problems(context)
    return found if skip_files else [*found, *context.inputs.problems]
