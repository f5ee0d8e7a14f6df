"""`--custom-rm-path FILE.py:function`: a reward from a file of the user's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from relax_cli.data.rewards.types import BatchReward
from relax_cli.errors import ConfigError, Problem


def load_custom(spec: str) -> BatchReward:
    """The function of `FILE.py:function`, from a list of `RewardInput` to a number or named numbers for each.

    Raises:
        ConfigError: the file is missing or fails to import, or has no such function.
    """
    path, separator, name = spec.rpartition(":")
    file = Path(path)
    if not separator or not name.isidentifier() or not file.is_file():
        raise _error(spec, "the reward file does not exist", got=path or spec)

    module_name = f"relax_custom_reward_{file.stem}"
    module_spec = importlib.util.spec_from_file_location(module_name, file)
    if module_spec is None or module_spec.loader is None:
        raise _error(spec, "the reward file is not Python", got=file.name)
    module = importlib.util.module_from_spec(module_spec)
    # Dataclasses and pickle look a class's module up by name.
    sys.modules[module_name] = module
    try:
        module_spec.loader.exec_module(module)
    # The file is user code: whatever it raises is reported with the file's name.
    except Exception as error:
        del sys.modules[module_name]
        raise _error(spec, f"the reward file fails to import: {type(error).__name__}: {error}", got=path) from error

    function = vars(module).get(name)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise _error(spec, f"the reward file has no function {name!r}", got=", ".join(functions) or "no function")
    reward: BatchReward = function
    return reward


def _error(spec: str, message: str, *, got: str) -> ConfigError:
    return ConfigError(
        Problem(
            id="custom-reward",
            message=message,
            option="--custom-rm-path",
            where=spec.rpartition(":")[0] or spec,
            got=got,
            expected="FILE.py:function, a function of list[RewardInput]",
            fix="--custom-rm-path FILE.py:function",
        )
    )
