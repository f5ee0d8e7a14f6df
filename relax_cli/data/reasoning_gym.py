"""Prompts that reasoning-gym generates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_type_hints
from urllib.parse import unquote

from pydantic import TypeAdapter, ValidationError

from relax_cli.config.names import nearest
from relax_cli.data.formats import MOST_ROWS
from relax_cli.data.rows import Prompt
from relax_cli.errors import MACHINE_THEME, ConfigError, problem_kind

REASONING_GYM = "reasoning-gym:"
INSTALL = "pip install 'relax-cli[reasoning-gym]'"
MISSING = problem_kind(
    "reasoning-gym-missing", MACHINE_THEME, "The reasoning-gym package is not installed.", option="--prompt-data"
)
TASK = problem_kind(
    "reasoning-gym-task",
    "Data",
    "There is no such reasoning-gym task, or it refuses the parameters.",
    option="--prompt-data",
)


def generate(spec: str) -> list[Prompt]:
    """The prompts of `reasoning-gym:TASK?size=N&seed=S&param=value`.
    Raises ConfigError: the package is missing, there is no such task, or it refuses the parameters."""
    task, _, query = spec.removeprefix(REASONING_GYM).partition("?")
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ConfigError(MISSING("the reasoning_gym package is not installed", got=spec, fix=INSTALL)) from error
    if task not in DATASETS:
        near = nearest(task, DATASETS, cutoff=0.0)
        what, fix = f"reasoning-gym has no task {task!r}", f"--prompt-data {REASONING_GYM}{near}"
        raise _task_error(spec, what, task, near, fix)
    parameters = dict(_parameters(spec, query, get_type_hints(DATASETS[task][1])))
    if parameters.get("size", 0) > MOST_ROWS:
        raise _task_error(spec, "too many prompts", query, f"at most {MOST_ROWS:,}", f"size={MOST_ROWS}")
    try:
        entries = list(create_dataset(task, **{"seed": 0, **parameters}))
    except Exception as error:
        message = f"reasoning-gym refuses the parameters of {task}: {error}"
        raise _task_error(spec, message, query, "", "correct the parameters") from error
    return [_prompt_of_entry(entry, f"{REASONING_GYM}{task}:{index}") for index, entry in enumerate(entries)]


def _prompt_of_entry(entry: dict[str, Any], source: str) -> Prompt:
    answer = entry["answer"]
    metadata = {**entry["metadata"], "question": entry["question"], "answer": answer}
    return Prompt(entry["question"], None if answer is None else str(answer), metadata, source)


def _parameters(spec: str, query: str, types: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for item in query.split("&") if query else ():
        name, _, value = item.partition("=")
        if name in seen:
            raise _task_error(spec, f"parameter {name!r} is given twice", query, f"one {name}", f"{name}={value}")
        seen.add(name)
        if name not in types:
            near = nearest(name, types, cutoff=0.0)
            raise _task_error(spec, f"unknown parameter {name!r}", name, ", ".join(types), f"{near}={value}")
        adapter, text = TypeAdapter(types[name]), unquote(value)
        try:
            # Numbers, booleans and words as they are typed; lists and objects as JSON.
            yield name, adapter.validate_json(text) if text[:1] in ("[", "{") else adapter.validate_strings(text)
        except ValidationError as error:
            what = f"bad value of {name!r}: {error.errors()[0]['msg']}"
            raise _task_error(spec, what, value, str(types[name]), f"{name}=…") from error


def _task_error(spec: str, message: str, got: str, expected: str, fix: str) -> ConfigError:
    return ConfigError(TASK(message, where=spec, got=got, expected=expected, fix=fix))
