"""`--custom-rm-path FILE.py:function`: a reward from a file of the user's."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from relax_cli.data.rewards.types import BatchReward
from relax_cli.errors import ConfigError, Problem, problem_kind
from relax_cli.plugin.apart import Unanswered, run_apart
from relax_cli.plugin.settings_kept import settings_kept
from relax_cli.plugin.user_code import UserCodeError, from_here, user_code

OPTION = "--custom-rm-path"
EXPECTED = "FILE.py:function, a function of list[RewardInput]"
SYNTAX = problem_kind("custom-rm-syntax", "Reward", "`--custom-rm-path` takes `FILE.py:function`.", option=OPTION)
FILE = problem_kind("custom-rm-file", "Reward", "The file cannot be read, or is not valid Python.", option=OPTION)
FUNCTION = problem_kind("custom-rm-function", "Reward", "The file does not define that function.", option=OPTION)
IMPORT = problem_kind(
    "custom-reward",
    "Reward",
    "The file of the reward fails to import, or what it defines cannot be called with a list of samples.",
    option=OPTION,
)


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
        raise _raised(f"{spec} fails to start", error, spec.rpartition(":")[0]) from error
    return reward


def check_custom(spec: str) -> list[Problem]:
    """What is wrong with a reward, found out in a process of its own: its import may do anything, or never end."""
    path = spec.rpartition(":")[0]
    try:
        return run_apart("relax_cli.data.rewards.custom:find_custom", spec)
    except Unanswered as error:
        return [IMPORT(f"the import of the reward file {error}", where=path, expected=EXPECTED, fix=f"correct {path}")]


def find_custom(spec: str) -> Any:
    """What `FILE.py:function` names, once it is known that it takes samples.

    Raises:
        ConfigError: see `load_custom`.
    """
    path, separator, name = spec.rpartition(":")
    file = Path(path)
    if not separator or not path or not name.isidentifier():
        raise _error(SYNTAX(f"{spec!r} is not FILE.py:function", expected=EXPECTED, fix=f"{OPTION} reward.py:score"))
    if not file.is_file():
        raise _error(FILE("the reward file does not exist", where=path, got=path, expected=EXPECTED, fix=_fix(path)))
    module = _import(file)
    if name not in module:
        functions = [key for key, value in module.items() if inspect.isfunction(value) and not key.startswith("_")]
        what = f"the reward file has no function {name!r}"
        fix = f"{OPTION} {path}:{functions[0]}" if len(functions) == 1 else f"define {name} in {path}"
        raise _error(FUNCTION(what, where=path, got=", ".join(functions) or "no function", expected=EXPECTED, fix=fix))
    target = module[name]
    if not _takes_samples(target):
        what = f"{name} cannot be called with a list of samples"
        got = f"{name}{_signature(target)}" if callable(target) else f"a {type(target).__name__}"
        raise _error(
            IMPORT(what, where=path, got=got, expected=f"def {name}(samples)", fix=f"correct {name} in {path}")
        )
    return target


def _import(file: Path) -> dict[str, Any]:
    module_name = f"relax_custom_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise _error(
            FILE("the reward file is not Python", where=str(file), got=file.name, expected=EXPECTED, fix=_fix())
        )
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look a class's module up by name.
    sys.modules[module_name] = module
    folder = str(file.resolve().parent)
    # As for `python FILE.py`: the file's neighbours come first while it is imported. For imports inside its functions
    # they come last afterwards, so that they hide no module that relax imports then.
    sys.path.insert(0, folder)
    try:
        with user_code(passes=()), settings_kept():
            spec.loader.exec_module(module)
    except UserCodeError as error:
        del sys.modules[module_name]
        raise _raised("the reward file fails to import", error, str(file)) from error
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)
    return vars(module)


def _takes_samples(target: Any) -> bool:
    """Whether a function, or the instance of a class, can be called with one argument."""
    arguments: list[Any] = [()]
    if isinstance(target, type):
        target, arguments = (
            next((vars(c)["__call__"] for c in target.__mro__ if "__call__" in vars(c)), None),
            [None, ()],
        )
    if not callable(target):
        return False
    try:
        inspect.signature(target).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        # Functions of C have no signature.
        return True
    return True


def _signature(target: Any) -> str:
    try:
        return str(inspect.signature(target))
    except (TypeError, ValueError):
        return "(…)"


def _fix(path: str = "FILE.py") -> str:
    return f"{OPTION} {path}:function, with a file that exists"


def _raised(what: str, error: UserCodeError, path: str) -> ConfigError:
    kind = FILE if isinstance(error.__cause__, SyntaxError) else IMPORT
    fix = f"correct {path}; `python {path}` shows the whole traceback"
    got = " → ".join(f"{Path(f.filename).name}:{f.lineno}: {f.line}" for f in error.frames[-4:])
    return _error(
        kind(f"{what}: {error.reason}", where=from_here(error.place) or path, got=got, expected=EXPECTED, fix=fix)
    )


def _error(problem: Problem) -> ConfigError:
    return ConfigError(problem)
