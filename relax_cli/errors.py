"""The error tree and the exit codes of every command.

Every error a user can meet has four short parts: what is wrong, where, what was got and expected, and a fix to type.
All of them survive pickling, because Ray carries them between processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Problem:
    """One finding about a configuration or its surroundings, in four parts."""

    id: str
    """Stable rule id, kebab-case, for example `ppo-needs-critic`."""
    message: str
    """What is wrong, one sentence."""
    fix: str
    """What to type or change."""
    option: str = ""
    """The option as a user types it, for example `--resource`; empty where none is to blame."""
    where: str = ""
    """Origin of the value: `default`, `recipe.yaml:12`, `RELAX_LR`, `--lr`, or a file:line in data."""
    got: str = ""
    expected: str = ""
    severity: Literal["error", "warning"] = "error"


class RelaxError(Exception):
    """Root of the errors that users see; `problems` holds one or more four-part findings."""

    exit_code = ExitCode.FAILED

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("; ".join(p.message for p in self.problems))

    def __reduce__(self) -> tuple[type[RelaxError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class RunError(RelaxError, RuntimeError):
    """The run started and failed."""


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
    """SIGTERM arrived; like KeyboardInterrupt no error, so nothing but the end of the run may catch it."""
