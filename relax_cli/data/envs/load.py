"""`--env NAME|FILE.py:Class`: an environment of a plugin, or of a file of the user's, and what it receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from relax_cli.data.rows import Messages
from relax_cli.errors import ConfigError, problem_kind
from relax_cli.plugin.records import Env, env_fault, load_reference
from relax_cli.plugin.user_file import UserFile, is_file_spec

THEME = "Episodes"
EXPECTED = "FILE.py:Class, a class with reset(row) and step(response)"
BROKEN = problem_kind(
    "env-broken",
    THEME,
    "The file of the environment fails to import, or what it defines is not made without arguments, or has no "
    "`reset(row)` or `step(response)`.",
    option="--env",
)
USER_FILE = UserFile(
    "environment", "env", BROKEN, "class", "env.py:Env", EXPECTED, tried_by=f"{__name__}:find_env",
    nowhere="No installed plugin provides an environment of that name.",
)  # fmt: skip


Observation = str | Messages
"""Text, or (with `--apply-chat-template`, where text is a user message) chat messages with `role` and `content`."""


@dataclass(frozen=True)
class EnvRow:
    """The row of the data that an episode starts from: a copy, which may be changed."""

    prompt: Observation
    label: Any
    """The row's label, None without `--label-key`."""
    metadata: dict[str, Any]
    seed: int
    """Of this sample, the same in every run: for an environment that draws numbers."""


@dataclass(frozen=True)
class EnvFactory:
    """Makes the environment of each episode."""

    name: str
    """As the user typed it."""
    make: Callable[[], Any]


def load_env(spec: str, named: Mapping[str, str]) -> EnvFactory:
    """The environment of `--env`; `named` are those of plugins, name to `"module:Class"`.
    Raises ConfigError: there is none of that name, or it does not load."""
    if is_file_spec(spec):
        return EnvFactory(spec, find_env(spec))
    if spec not in named:
        raise ConfigError(USER_FILE.unknown(spec, named))
    return EnvFactory(spec, load_reference(named[spec], f"{Env.what} {spec}"))


def find_env(spec: str) -> Any:
    """The class of `FILE.py:Class`, once it is known that it can be an environment.
    Raises ConfigError: the file is missing or fails to import, or has no such class."""
    target = USER_FILE.find(spec, lambda value: isinstance(value, type) and not env_fault(value))
    if fault := env_fault(target):
        raise USER_FILE.unfit(spec, "be an environment", target, fault)
    return target
