"""Reward functions: loaded by name or file, called on a batch, and checked: only finite numbers train."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pkgutil import resolve_name

from relax_cli.config.schema import RewardSection
from relax_cli.data.rewards.builtin import BUILTIN_REWARDS, BUILTINS, REMOTE, url_fault
from relax_cli.data.rewards.types import REWARD, BatchReward, RewardFunction, RewardInput, RewardResult, Score
from relax_cli.errors import ConfigError, problem_kind
from relax_cli.plugin.user_code import UserCodeError, user_code

__all__ = ["BUILTIN_REWARDS", "BatchReward", "RewardFunction", "RewardInput", "RewardResult", "Score", "load_reward"]

REWARD_UNKNOWN = problem_kind(
    "reward-unknown", "Reward", "There is no reward of that name, or it does not load.", option="--rm-type"
)


def load_reward(section: RewardSection, named: Mapping[str, str]) -> RewardFunction:
    """The reward of `--rm-type` or `--custom-rm-path`.

    Args:
        section: what the user chose.
        named: rewards of plugins, name to `"module:function"`, besides the built-in ones.

    Raises:
        ConfigError: none or both are given, the name is unknown or claimed twice, or it does not load.
    """
    # Here, because the rules of a configuration import this package, and have no use for asyncio.
    from relax_cli.data.rewards.checked import CheckedReward
    from relax_cli.data.rewards.chosen import ChosenReward

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
        from relax_cli.data.rewards.custom import load_custom

        return load_custom(name), name
    reference = _find(name, named)
    if name == REMOTE:
        from relax_cli.data.rewards.remote import RemoteReward

        if section.rm_url is None or url_fault(section.rm_url):
            raise _error("--rm-type remote needs a URL", got="none that is usable", fix="--rm-url URL")
        remote = RemoteReward(section.rm_url)
        return remote, f"{REMOTE} ({remote.shown_url})"
    if name in BUILTINS and BUILTINS[name].apart:
        from relax_cli.data.rewards.pool import UNJUDGED, PooledReward

        builtin = BUILTINS[name]
        parts = [part for part in builtin.parts or () if part not in (REWARD, UNJUDGED)]
        return PooledReward(name, reference, parts, deadline=builtin.deadline), name
    return _load(name, reference), name


def _find(name: str, named: Mapping[str, str]) -> str:
    if name in named and name in BUILTIN_REWARDS:
        raise _error(f"a plugin also calls its reward {name!r}", got=named[name], fix="rename the plugin's reward")
    known = {**BUILTIN_REWARDS, **named}
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise _error(f"there is no reward {name!r}", got=name, expected=", ".join(known), fix=f"--rm-type {nearest}")
    return known[name]


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
