"""`--custom-rm-path FILE.py:function`: a reward from a file of the user's."""

from __future__ import annotations

import inspect
from typing import Any

from relax_cli.data.rewards.types import BatchReward
from relax_cli.errors import Problem, problem_kind
from relax_cli.plugin.user_code import UserCodeError, settings_kept, user_code
from relax_cli.plugin.user_file import accepts, user_file

IMPORT = problem_kind(
    "custom-reward",
    "Reward",
    "The file of the reward fails to import, or what it defines cannot be called with a list of samples.",
    option="--custom-rm-path",
)
EXPECTED = "FILE.py:function, a function of list[RewardInput]"
USER_FILE = user_file("reward", "custom-rm", IMPORT, "function", "reward.py:score", EXPECTED)


def load_custom(spec: str) -> BatchReward:
    """The function of `FILE.py:function`, from a list of `RewardInput` to a number or named numbers for each.

    A class is called without arguments, and its instance is the function.

    Raises:
        ConfigError: the file is missing or fails to import, or has no such function.
    """
    target = find_custom(spec)
    try:
        with user_code(passes=()), settings_kept():
            reward: BatchReward = target() if isinstance(target, type) else target
    except UserCodeError as error:
        raise USER_FILE.raised(f"{spec} fails to start", error, spec.rpartition(":")[0]) from error
    return reward


def check_custom(spec: str) -> list[Problem]:
    """What is wrong with a reward of a file."""
    return USER_FILE.check(f"{__name__}:find_custom", spec)


def find_custom(spec: str) -> Any:
    """What `FILE.py:function` names, once it is known that it takes samples. Raises ConfigError: see `load_custom`."""
    target = USER_FILE.find(spec, inspect.isfunction)
    if not _takes_samples(target):
        name = spec.rpartition(":")[2]
        raise USER_FILE.unfit(spec, "be called with a list of samples", target, expected=f"def {name}(samples)")
    return target


def _takes_samples(target: Any) -> bool:
    """Whether a function, or the instance of a class, can be called with one argument."""
    if isinstance(target, type):
        method = next((vars(c)["__call__"] for c in target.__mro__ if "__call__" in vars(c)), None)
        return callable(method) and accepts(method, None, ())
    return callable(target) and accepts(target, ())
