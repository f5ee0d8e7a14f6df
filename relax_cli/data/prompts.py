"""Prompts from a JSONL file or a reasoning-gym task, and the order in which rollouts use them."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import unquote

import numpy as np
from pydantic import TypeAdapter, ValidationError

from relax_cli.config.schema import DataSection
from relax_cli.errors import ConfigError, Problem

REASONING_GYM = "reasoning-gym:"
MOST_PROBLEMS = 20
"""Bad rows named one by one; the rest is counted."""


@dataclass(frozen=True)
class Prompt:
    """One thing to respond to."""

    content: str | list[dict[str, str]]
    """Text, or chat messages with `role` and `content`."""
    label: str | None
    """What the reward compares with."""
    metadata: dict[str, Any]
    """Free-form, handed to the reward."""
    source: str
    """`file:line`, or the reasoning-gym task and index."""


def load_prompts(section: DataSection, spec: str) -> list[Prompt]:
    """Read every prompt of `spec`: a JSONL file, or `reasoning-gym:TASK?size=N&seed=S&param=value`.

    Raises:
        ConfigError: the data are missing, empty or have bad rows (each named by file and line), or there is
            no such task or parameter.
    """
    if spec.startswith(REASONING_GYM):
        return _generate(spec)
    return _read_jsonl(section, Path(spec))


@dataclass(frozen=True)
class PromptOrder:
    """Which of `n` prompts a rollout uses, as a pure function: a resumed run goes on where it was.

    Every epoch uses each prompt once, in an order of its own; batches run across epoch borders.
    """

    n: int
    seed: int
    shuffle: bool

    def rows(self, rollout_id: int, batch: int) -> list[int]:
        """Prompt indices `[batch]` of rollout `rollout_id`."""
        epochs = functools.cache(self._epoch)
        places = (divmod(place, self.n) for place in range(rollout_id * batch, (rollout_id + 1) * batch))
        return [int(epochs(epoch)[index]) for epoch, index in places]

    def _epoch(self, epoch: int) -> np.ndarray[Any, np.dtype[np.intp]]:
        if not self.shuffle:
            return np.arange(self.n)
        # Over its versions numpy keeps the raw bits of a seed, but not what `Generator.permutation` does.
        keys = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(self.n)
        return np.argsort(keys, kind="stable")


def _read_jsonl(section: DataSection, path: Path) -> list[Prompt]:
    prompts: list[Prompt] = []
    problems: list[Problem] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                row = _parse_row(section, line, f"{path}:{number}") if line.strip() else None
                if isinstance(row, Prompt):
                    prompts.append(row)
                elif row is not None:
                    problems.append(row)
    except OSError as error:
        raise ConfigError(
            Problem(
                id="prompt-data-unreadable",
                message=f"prompt data cannot be read: {error.strerror or error}",
                option="--prompt-data",
                got=str(path),
                expected="a JSONL file",
                fix="--prompt-data FILE.jsonl",
            )
        ) from error
    if len(problems) > MOST_PROBLEMS:
        problems[MOST_PROBLEMS:] = [_more_problems(path, len(problems) - MOST_PROBLEMS)]
    if problems:
        raise ConfigError(problems)
    if not prompts:
        raise ConfigError(_empty(str(path)))
    return prompts


def _parse_row(section: DataSection, line: bytes, where: str) -> Prompt | Problem:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        text = line.decode(errors="replace").strip()
        return _bad_row(where, f"line is not JSON: {error}", got=text[:80], expected="one JSON object a line")
    if not isinstance(row, dict):
        return _bad_row(where, "line is not a JSON object", got=type(row).__name__, expected='{"input": …}')

    keys = [("--input-key", section.input_key)]
    if section.label_key is not None:
        keys.append(("--label-key", section.label_key))
    for option, key in keys:
        if key not in row:
            return _bad_row(
                where,
                f"row has no key {key!r}",
                option=option,
                got=", ".join(row) or "no keys",
                expected=key,
                fix=f"{option} {next(iter(row), key)}",
            )

    content = row[section.input_key]
    label = None if section.label_key is None else row[section.label_key]
    metadata = {} if row.get(section.metadata_key) is None else row[section.metadata_key]
    if not _is_content(content):
        return _bad_row(
            where,
            f"{section.input_key!r} is neither text nor chat messages",
            got=json.dumps(content)[:80],
            expected='text, or [{"role": "user", "content": "…"}]',
        )
    if section.label_key is not None and not isinstance(label, str | int | float):
        return _bad_row(
            where,
            f"{section.label_key!r} is not text",
            got=json.dumps(label)[:80],
            expected="text or a number",
        )
    if not isinstance(metadata, dict):
        return _bad_row(
            where, f"{section.metadata_key!r} is not an object", got=json.dumps(metadata)[:80], expected="{…}"
        )
    return Prompt(content, label if isinstance(label, str | None) else json.dumps(label), metadata, where)


def _is_content(content: Any) -> bool:
    if isinstance(content, str):
        return bool(content) and _is_unicode(content)
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(message, dict) and {"role", "content"} <= set(message) for message in content)
        and all(isinstance(value, str) and _is_unicode(value) for message in content for value in message.values())
    )


def _is_unicode(text: str) -> bool:
    # JSON can spell lone surrogates ("\ud800"), which no tokenizer takes.
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _bad_row(
    where: str, message: str, *, got: str, expected: str, option: str = "--prompt-data", fix: str = ""
) -> Problem:
    return Problem(
        id="prompt-data-row",
        message=message,
        option=option,
        where=where,
        got=got,
        expected=expected,
        fix=fix or f"correct or remove {where}",
    )


def _more_problems(path: Path, count: int) -> Problem:
    return Problem(
        id="prompt-data-row",
        message=f"{count} more bad rows",
        option="--prompt-data",
        where=str(path),
        fix="correct the rows above first",
    )


def _empty(spec: str) -> Problem:
    return Problem(
        id="prompt-data-empty",
        message="prompt data hold no prompt",
        option="--prompt-data",
        got=spec,
        expected="at least one prompt",
        fix="--prompt-data FILE.jsonl with at least one row",
    )


def _generate(spec: str) -> list[Prompt]:
    task, _, query = spec.removeprefix(REASONING_GYM).partition("?")
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ConfigError(
            Problem(
                id="reasoning-gym-missing",
                message="the reasoning_gym package is not installed",
                option="--prompt-data",
                got=spec,
                fix="pip install 'relax-cli[reasoning-gym]'",
            )
        ) from error
    if task not in DATASETS:
        nearest = difflib.get_close_matches(task, DATASETS, n=1, cutoff=0.0)[0]
        raise _task_error(
            spec,
            f"reasoning-gym has no task {task!r}",
            task,
            nearest,
            f"--prompt-data {REASONING_GYM}{nearest}",
        )

    parameters = dict(_parameters(spec, query, get_type_hints(DATASETS[task][1])))
    try:
        entries = list(create_dataset(task, **{"seed": 0, **parameters}))
    # reasoning_gym validates its configurations with `assert`.
    except (AssertionError, ValueError, TypeError) as error:
        raise _task_error(
            spec,
            f"reasoning-gym refuses the parameters of {task}: {error}",
            query,
            "",
            "correct the parameters",
        ) from error
    if not entries:
        raise ConfigError(_empty(spec))
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
            nearest = difflib.get_close_matches(name, types, n=1, cutoff=0.0)[0]
            raise _task_error(spec, f"unknown parameter {name!r}", name, ", ".join(types), f"{nearest}={value}")
        adapter = TypeAdapter(types[name])
        try:
            yield name, _validate(adapter, unquote(value))
        except ValidationError as error:
            message = error.errors()[0]["msg"]
            raise _task_error(
                spec, f"bad value of {name!r}: {message}", value, str(types[name]), f"{name}=…"
            ) from error


def _validate(adapter: TypeAdapter[Any], value: str) -> Any:
    """Numbers, booleans and words as they are typed; lists and objects as JSON."""
    return adapter.validate_json(value) if value[:1] in ("[", "{") else adapter.validate_strings(value)


def _task_error(spec: str, message: str, got: str, expected: str, fix: str) -> ConfigError:
    return ConfigError(
        Problem(
            id="reasoning-gym-task",
            message=message,
            option="--prompt-data",
            where=spec,
            got=got,
            expected=expected,
            fix=fix,
        )
    )
