"""The error tree and the exit codes of every command.

Every error a user can meet has four short parts: what is wrong, where, what was got and expected, and a fix to type.
All of them survive pickling, because Ray carries them between processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal


class ExitCode(IntEnum):
    """Exit codes of `relax`."""

    OK = 0
    FAILED = 1
    USAGE = 2
    CANNOT_RESUME = 3
    ENVIRONMENT = 4
    INTERRUPTED = 130
    TERMINATED = 143


Severity = Literal["error", "warning"]

MACHINE_THEME = "This machine"
"""Theme of the problems that are notes where a configuration may be meant for another machine."""


@dataclass(frozen=True)
class Problem:
    """One finding about a configuration or its surroundings, in four parts."""

    id: str
    """Stable rule id, kebab-case, for example `ppo-needs-critic`."""
    message: str
    fix: str
    option: str = ""
    """The option as a user types it, for example `--resource`; empty where none is to blame."""
    where: str = ""
    """Origin of the value: `default`, `recipe.yaml:12`, `RELAX_LR`, `--lr`, or a file:line in data."""
    got: str = ""
    expected: str = ""
    severity: Severity = "error"
    count: int = 1
    places: tuple[str, ...] = ()
    """The first places, where it was found more than once; `where` is the first of them."""


MOST_PLACES = 5
MOST_PROBLEMS = 20


class RepeatedProblems:
    """Collects problems of many rows: those that say the same become one, with a count and the first places."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], Problem] = {}
        self._left_out = 0

    def add(self, problem: Problem) -> None:
        """Count it, or keep it when it is the first of its kind."""
        key = (problem.id, problem.option, problem.message)
        if first := self._found.get(key):
            places = ((*(first.places or (first.where,)), problem.where))[:MOST_PLACES]
            self._found[key] = replace(first, count=first.count + 1, places=places)
        elif len(self._found) < MOST_PROBLEMS:
            self._found[key] = problem
        else:
            self._left_out += 1

    def all(self) -> list[Problem]:
        """The problems in the order in which they were first found."""
        found = list(self._found.values())
        if self._left_out:
            last = found[-1]
            found.append(replace(last, message=f"{self._left_out} more problems", count=1, places=(), got="", where=""))
        return found


@dataclass(frozen=True)
class ProblemKind:
    """What all problems of one id share, declared once, next to the code that finds them; `docs/rules.md` lists them.
    Calling it makes a `Problem` of this kind."""

    id: str
    theme: str
    """Heading of `docs/rules.md` under which it stands."""
    summary: str
    """What the page says about it: when it is reported and why. Markdown."""
    option: str = ""
    severity: Severity = "error"

    def __call__(
        self, message: str, *, fix: str, option: str | None = None, where: str = "", got: str = "", expected: str = ""
    ) -> Problem:
        """A problem of this kind; `option` replaces the kind's own."""
        blamed = self.option if option is None else option
        return Problem(self.id, message, fix, blamed, where, got, expected, self.severity)


_KINDS: dict[str, ProblemKind] = {}


def problem_kind(id: str, theme: str, summary: str, *, option: str = "", severity: Severity = "error") -> ProblemKind:
    """Declare a kind of problem, at import time."""
    kind = ProblemKind(id, theme, summary, option, severity)
    # A module that is imported twice declares the same kind twice.
    assert _KINDS.setdefault(id, kind) == kind, f"two kinds of problems have the id {id}"
    return kind


def problem_kinds(theme: str, *, option: str = "") -> Callable[..., ProblemKind]:
    """`problem_kind` of one theme, and of one option where it is given."""

    def declare(id: str, summary: str, *, option: str = option, severity: Severity = "error") -> ProblemKind:
        return problem_kind(id, theme, summary, option=option, severity=severity)

    return declare


def declared_kinds() -> tuple[ProblemKind, ...]:
    """Every kind that the modules imported so far have declared."""
    return tuple(_KINDS.values())


def is_about_machine(problem: Problem) -> bool:
    """Whether it is what this machine lacks, and says nothing against the configuration."""
    kind = _KINDS.get(problem.id)
    return kind is not None and kind.theme == MACHINE_THEME


class RelaxError(Exception):
    """Root of the errors that users see; `problems` are one or more four-part findings."""

    exit_code = ExitCode.FAILED

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("; ".join(p.message for p in self.problems))

    def __reduce__(self) -> tuple[type[RelaxError], tuple[tuple[Problem, ...]], dict[str, object]]:
        return type(self), (self.problems,), self.__dict__


class RunError(RelaxError, RuntimeError):
    """The run started and failed."""


class ProcessLost(RunError):
    """A process of the run is gone, so the session can only be closed."""


class ConfigError(RelaxError, ValueError):
    """Usage, configuration or input data is wrong; nothing was launched."""

    exit_code = ExitCode.USAGE


class ResumeError(RelaxError, ValueError):
    """The checkpoints given cannot be resumed from."""

    exit_code = ExitCode.CANNOT_RESUME


class EnvironmentFault(RelaxError, ValueError):
    """This machine lacks something the run needs."""

    exit_code = ExitCode.ENVIRONMENT


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived; like KeyboardInterrupt no error, so nothing but the end of the run may catch it."""


LIMITS = {
    "[Oo]ut of memory|not enough memory|Cannot allocate memory|MemoryError": "use a smaller --micro-batch-size or "
    "fewer ranks in --resource, or free memory (free -h and nvidia-smi show it)",
    r"Too many open files|\[Errno 24\]": "ulimit -n $(ulimit -Hn), then start again",
    r"start new thread|Resource temporarily unavailable|\[Errno 11\]": "ulimit -u $(ulimit -Hu), then start again",
    "File too large": "ulimit -f unlimited, or a disk that takes larger files",
}
"""What the system and libraries say at their limits, and what helps."""


def way_out(said: str) -> str | None:
    """What helps against the limit that an error's text is about; None for any other error."""
    return next((advice for cause, advice in LIMITS.items() if re.search(cause, said)), None)
