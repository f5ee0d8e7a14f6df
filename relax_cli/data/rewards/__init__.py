"""Reward functions: loaded by name or file, called on a batch, and checked: only finite numbers train."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from relax_cli.config.schema import RewardSection
from relax_cli.data.rewards.types import REWARD, BatchReward, RewardInput, RewardResult, Score
from relax_cli.errors import ConfigError, problem_kind
from relax_cli.plugin.user_code import UserCodeError, settings_kept, user_code
from relax_cli.plugin.user_file import UserFile, accepts

if TYPE_CHECKING:
    from relax_cli.data.rewards.checked import ChosenReward

__all__ = ["BUILTIN_REWARDS", "BatchReward", "RewardInput", "RewardResult", "Score", "load_reward"]

CUSTOM = problem_kind(
    "custom-reward",
    "Reward",
    "The file of the reward fails to import, or what it defines cannot be called with a list of samples.",
    option="--custom-rm-path",
)
EXPECTED = "FILE.py:function, a function of list[RewardInput]"
USER_FILE = UserFile(
    "reward", "custom-rm", CUSTOM, "function", "reward.py:score", EXPECTED, tried_by=f"{__name__}:find_custom"
)
REWARD_UNKNOWN = problem_kind(
    "reward-unknown", "Reward", "There is no reward of that name, or it does not load.", option="--rm-type"
)

REMOTE = "remote"
"""The `--rm-type` that asks `--rm-url`."""
HERE = __name__


@dataclass(frozen=True)
class Builtin:
    """A reward of relax."""

    function: str
    """`"module:function"` that judges one sample; where it is judged apart, or a class whose instances do."""
    parts: tuple[str, ...] | None = ()
    """What `--reward-key` may pick; None: known once it has judged."""
    needs_label: bool = True
    apart: bool = False
    """Whether it is judged in worker processes with a deadline."""
    deadline: float = 5.0
    """Seconds for a sample, where it is judged apart."""


BUILTINS: Mapping[str, Builtin] = {
    "code": Builtin(f"{HERE}.code:CodeJudge", ("reward", "passed", "timed_out", "unjudged"), apart=True, deadline=15.0),
    "exact": Builtin(f"{HERE}.text:exact"),
    "f1": Builtin(f"{HERE}.text:f1", ("reward", "exact")),
    "format": Builtin(f"{HERE}.text:tagged", needs_label=False),
    "json_schema": Builtin(f"{HERE}.text:json_schema", ("reward", "json", "unjudged"), apart=True),
    "math": Builtin(f"{HERE}.math:MathJudge", ("reward", "correct", "unjudged"), apart=True),
    "multiple_choice": Builtin(f"{HERE}.text:multiple_choice", ("reward", "answered")),
    "reasoning_gym": Builtin(
        f"{HERE}.reasoning_gym:judge", ("reward", "score", "correct", "unjudged"), needs_label=False, apart=True
    ),
    "regex": Builtin(f"{HERE}.text:regex", ("reward", "unjudged"), apart=True),
    REMOTE: Builtin(f"{HERE}.remote:RemoteReward", None, needs_label=False),
}
BUILTIN_REWARDS: Mapping[str, str] = {name: reward.function for name, reward in BUILTINS.items()}


def url_fault(url: str) -> str:
    """What makes a URL unusable; empty when nothing does."""
    if any(character.isspace() or not character.isprintable() for character in url):
        return "contains a blank or a control character"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        # Messages of the parser name the port or address, never the password.
        return f"is not a URL: {error}" if "@" not in str(error) else "is not a URL"
    if parts.scheme not in ("http", "https"):
        return f"has the scheme {parts.scheme!r}" if parts.scheme else "has no scheme"
    if not parts.hostname:
        return "names no host"
    return "has the port 0" if port == 0 else ""


def load_reward(section: RewardSection, named: Mapping[str, str]) -> ChosenReward:
    """The reward of `--rm-type` or `--custom-rm-path`; `named` are those of plugins, name to `"module:function"`.
    Raises ConfigError: none or both are given, the name is unknown or claimed twice, or it does not load."""
    # Here, because the rules of a configuration import this package, and have no use for asyncio.
    from relax_cli.data.rewards.checked import CheckedReward, ChosenReward

    if section.rm_type is not None and section.custom_rm_path is not None:
        got = f"{section.rm_type} and {section.custom_rm_path}"
        raise _error("--rm-type and --custom-rm-path exclude each other", got=got, fix="leave one of them out")
    if section.custom_rm_path is None and section.rm_type is None:
        fix = "--rm-type exact, or --custom-rm-path FILE.py:function"
        raise _error("no reward is given", got="neither", fix=fix)

    def load(name: str) -> CheckedReward:
        function, shown = _function(name, section, named)
        return CheckedReward(shown, function, section.reward_key, section.rm_timeout)

    # The path of a file may have commas.
    default = section.shares if section.custom_rm_path is None else ((section.custom_rm_path, "1"),)
    return ChosenReward(default, load, section.reward_on_error)


def _function(name: str, section: RewardSection, named: Mapping[str, str]) -> tuple[BatchReward, str]:
    """What judges batches, and what it is called in messages."""
    if name == section.custom_rm_path:
        return load_custom(name), name
    if name in named:
        if name in BUILTINS:
            raise _error(f"a plugin also calls its reward {name!r}", got=named[name], fix="rename the plugin's reward")
        return _load(name, named[name]), name
    if name not in BUILTINS:
        known = [*BUILTINS, *named]
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise _error(f"there is no reward {name!r}", got=name, expected=", ".join(known), fix=f"--rm-type {nearest}")
    if name == REMOTE:
        from relax_cli.data.rewards.remote import RemoteReward

        if section.rm_url is None or url_fault(section.rm_url):
            raise _error("--rm-type remote needs a URL", got="none that is usable", fix="--rm-url URL")
        remote = RemoteReward(section.rm_url)
        return remote, f"{REMOTE} ({remote.shown_url})"
    builtin = BUILTINS[name]
    if builtin.apart:
        from relax_cli.data.rewards.pool import UNJUDGED, PooledReward

        parts = [part for part in builtin.parts or () if part not in (REWARD, UNJUDGED)]
        return PooledReward(name, builtin.function, parts, deadline=builtin.deadline), name
    judge = resolve_name(builtin.function)
    return lambda samples: [judge(sample) for sample in samples], name


def _load(name: str, reference: str) -> BatchReward:
    try:
        with user_code():
            target = resolve_name(reference)
            reward: BatchReward = target() if isinstance(target, type) else target
    except UserCodeError as error:
        what = f"the reward {name!r} does not load: {error.reason}"
        got = "; ".join(filter(None, (reference, error.place)))
        raise _error(what, got=got, fix="update or remove the package that provides it") from error
    return reward


def _error(message: str, *, got: str, fix: str, expected: str = "") -> ConfigError:
    return ConfigError(REWARD_UNKNOWN(message, got=got, expected=expected, fix=fix))


def load_custom(spec: str) -> BatchReward:
    """The function of `FILE.py:function`, or an instance of its class.
    Raises ConfigError: the file is missing or fails to import, or has no such function."""
    target = find_custom(spec)
    try:
        with user_code(passes=()), settings_kept():
            reward: BatchReward = target() if isinstance(target, type) else target
    except UserCodeError as error:
        raise USER_FILE.raised(f"{spec} fails to start", error, spec.rpartition(":")[0]) from error
    return reward


def find_custom(spec: str) -> Any:
    """What `FILE.py:function` names, once it is known that it takes samples. Raises ConfigError: see `load_custom`."""
    target = USER_FILE.find(spec, inspect.isfunction)
    if not _takes_samples(target):
        raise USER_FILE.unfit(spec, "be called with a list of samples", target)
    return target


def _takes_samples(target: Any) -> bool:
    """Whether a function, or the instance of a class, can be called with one argument."""
    if isinstance(target, type):
        method = next((vars(c)["__call__"] for c in target.__mro__ if "__call__" in vars(c)), None)
        return callable(method) and accepts(method, None, ())
    return callable(target) and accepts(target, ())
