"""Reward functions: loaded by name or file, called on a batch, and checked: only finite numbers train."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence

# Not `import math`: loading the submodule of that name would replace it in this namespace.
from math import isfinite, nan
from typing import Any, Protocol

from relax_cli.config.schema import RewardSection
from relax_cli.data.rewards.builtin import BUILTIN_REWARDS, REMOTE, url_fault
from relax_cli.data.rewards.types import BatchReward, RewardInput, RewardResult, Score
from relax_cli.errors import ConfigError, Problem, RunError

__all__ = [
    "BUILTIN_REWARDS",
    "BatchReward",
    "RewardFunction",
    "RewardInput",
    "RewardResult",
    "Score",
    "load_reward",
]


class RewardFunction(Protocol):
    """A loaded reward."""

    def __call__(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        """Judge a batch.

        Raises:
            RunError: the function failed, or returned something other than one finite number for each sample.
        """

    def close(self) -> None:
        """End the worker processes, if there are any."""


def load_reward(section: RewardSection, named: Mapping[str, str]) -> RewardFunction:
    """The reward of `--rm-type` or `--custom-rm-path`.

    Args:
        section: what the user asked for.
        named: rewards of plugins, name to `"module:function"`; they stand beside the built-in ones.

    Raises:
        ConfigError: none or both are given, the name is unknown or claimed twice, or it does not load.
    """
    if section.rm_type is not None and section.custom_rm_path is not None:
        raise _config_error(
            "--rm-type and --custom-rm-path exclude each other",
            got=f"{section.rm_type} and {section.custom_rm_path}",
            fix="leave one of them out",
        )
    if section.custom_rm_path is not None:
        from relax_cli.data.rewards.custom import load_custom

        return _Checked(section.custom_rm_path, load_custom(section.custom_rm_path), section.reward_key)
    if section.rm_type is None:
        raise _config_error(
            "no reward is given", got="neither", fix="--rm-type exact, or --custom-rm-path FILE.py:function"
        )
    reference = _find(section.rm_type, named)
    if section.rm_type == REMOTE:
        return _load_remote(section)
    return _Checked(section.rm_type, _load(section.rm_type, reference), section.reward_key)


def _find(name: str, named: Mapping[str, str]) -> str:
    if name in named and name in BUILTIN_REWARDS:
        raise _config_error(
            f"a plugin also calls its reward {name!r}", got=named[name], fix="rename the plugin's reward"
        )
    known = {**BUILTIN_REWARDS, **named}
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise _config_error(
            f"there is no reward {name!r}", got=name, expected=", ".join(known), fix=f"--rm-type {nearest}"
        )
    return known[name]


def _load_remote(section: RewardSection) -> RewardFunction:
    from relax_cli.data.rewards.remote import RemoteReward

    if section.rm_url is None or url_fault(section.rm_url):
        raise _config_error("--rm-type remote needs a URL", got="none that is usable", fix="--rm-url URL")
    remote = RemoteReward(section.rm_url)
    return _Checked(f"{REMOTE} ({remote.shown_url})", remote, section.reward_key)


def _load(name: str, reference: str) -> BatchReward:
    module, _, attribute = reference.partition(":")
    try:
        target = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise _config_error(
            f"the reward {name!r} does not load: {error}", got=reference, fix="pip install what it needs"
        ) from error
    function: BatchReward = target() if isinstance(target, type) else target
    return function


class _Checked:
    """Calls a reward and refuses everything but one finite number for each sample."""

    def __init__(self, name: str, function: BatchReward, key: str | None) -> None:
        self._name = name
        self._function = function
        self._key = key

    def __call__(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        try:
            scores = list(self._function(samples))
        except RunError:
            raise
        # User code may raise anything; the error says whose code it was.
        except Exception as error:
            raise self._error(f"failed: {type(error).__name__}: {error}") from error
        if len(scores) != len(samples):
            raise self._error("returned another number of scores than samples", len(scores), len(samples))
        return [self._result(score, sample) for score, sample in zip(scores, samples, strict=True)]

    def close(self) -> None:
        close: Callable[[], None] | None = getattr(self._function, "close", None)
        if close is not None:
            close()

    def _result(self, score: Score, sample: RewardInput) -> RewardResult:
        if isinstance(score, RewardResult):
            parts = self._numbers(score.parts, sample)
            reward = self._number(score.reward, sample) if self._key is None else self._pick(parts, sample)
        elif isinstance(score, Mapping):
            parts = self._numbers(score, sample)
            reward = self._pick(parts, sample)
        elif self._key is not None:
            raise self._error("returned one number, so there is no part to pick", score, self._key, sample)
        else:
            parts, reward = {}, self._number(score, sample)
        return RewardResult(reward, parts)

    def _pick(self, parts: dict[str, float], sample: RewardInput) -> float:
        if self._key is None and len(parts) == 1:
            return next(iter(parts.values()))
        if self._key not in parts:
            what = "returned several parts" if self._key is None else f"returned no part {self._key!r}"
            fix = f"--reward-key {next(iter(parts), 'NAME')}"
            raise self._error(what, ", ".join(parts) or "no parts", self._key or "a --reward-key", sample, fix)
        return parts[self._key]

    def _numbers(self, parts: Mapping[str, float], sample: RewardInput) -> dict[str, float]:
        return {str(name): self._number(value, sample) for name, value in parts.items()}

    def _number(self, value: Any, sample: RewardInput) -> float:
        try:
            # float() also takes numpy and torch scalars; it would take "1.0", which is a mistake here.
            number = nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            number = nan
        if not isfinite(number):
            raise self._error("returned something that is not a finite number", repr(value), "a number", sample)
        return number

    def _error(
        self,
        what: str,
        got: object = "",
        expected: object = "",
        sample: RewardInput | None = None,
        fix: str = "",
    ) -> RunError:
        return RunError(
            Problem(
                id="reward-failed",
                message=f"the reward {self._name} {what}",
                where="" if sample is None else sample.describe(),
                got=str(got),
                expected=str(expected),
                fix=fix or f"correct the reward {self._name}",
            )
        )


def _config_error(message: str, *, got: str, fix: str, expected: str = "") -> ConfigError:
    return ConfigError(
        Problem(id="reward-unknown", message=message, option="--rm-type", got=got, expected=expected, fix=fix)
    )
