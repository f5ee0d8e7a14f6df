"""Reward functions: loaded by name or file, called on a batch, and checked: only finite numbers train."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module

from relax_cli.config.schema import RewardSection
from relax_cli.data.rewards.builtin import BUILTIN_REWARDS, REMOTE, url_fault
from relax_cli.data.rewards.types import BatchReward, RewardFunction, RewardInput, RewardResult, Score
from relax_cli.errors import ConfigError, problem_kind
from relax_cli.plugin.user_code import UserCodeError, user_code

__all__ = [
    "BUILTIN_REWARDS",
    "BatchReward",
    "RewardFunction",
    "RewardInput",
    "RewardResult",
    "Score",
    "load_reward",
]

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

    if section.rm_type is not None and section.custom_rm_path is not None:
        got = f"{section.rm_type} and {section.custom_rm_path}"
        raise _error("--rm-type and --custom-rm-path exclude each other", got=got, fix="leave one of them out")
    if section.custom_rm_path is not None:
        from relax_cli.data.rewards.custom import load_custom

        custom = load_custom(section.custom_rm_path)
        return CheckedReward(section.custom_rm_path, custom, section.reward_key, section.rm_timeout)
    if section.rm_type is None:
        fix = "--rm-type exact, or --custom-rm-path FILE.py:function"
        raise _error("no reward is given", got="neither", fix=fix)
    reference = _find(section.rm_type, named)
    if section.rm_type == REMOTE:
        from relax_cli.data.rewards.remote import RemoteReward

        if section.rm_url is None or url_fault(section.rm_url):
            raise _error("--rm-type remote needs a URL", got="none that is usable", fix="--rm-url URL")
        remote = RemoteReward(section.rm_url)
        return CheckedReward(f"{REMOTE} ({remote.shown_url})", remote, section.reward_key, section.rm_timeout)
    reward = _load(section.rm_type, reference)
    return CheckedReward(section.rm_type, reward, section.reward_key, section.rm_timeout)


def _find(name: str, named: Mapping[str, str]) -> str:
    if name in named and name in BUILTIN_REWARDS:
        raise _error(f"a plugin also calls its reward {name!r}", got=named[name], fix="rename the plugin's reward")
    known = {**BUILTIN_REWARDS, **named}
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise _error(f"there is no reward {name!r}", got=name, expected=", ".join(known), fix=f"--rm-type {nearest}")
    return known[name]


def _load(name: str, reference: str) -> BatchReward:
    module, _, attribute = reference.partition(":")
    try:
        with user_code():
            target = getattr(import_module(module), attribute)
            reward: BatchReward = target() if isinstance(target, type) else target
    except UserCodeError as error:
        what = f"the reward {name!r} does not load: {error.reason}"
        got = "; ".join(filter(None, (reference, error.place)))
        raise _error(what, got=got, fix="update or remove the package that provides it") from error
    return reward


def _error(message: str, *, got: str, fix: str, expected: str = "") -> ConfigError:
    return ConfigError(REWARD_UNKNOWN(message, got=got, expected=expected, fix=fix))
