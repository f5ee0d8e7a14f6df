"""Prompts from a JSONL or Parquet file or a reasoning-gym task, and the order in which rollouts use them."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import unquote

from pydantic import TypeAdapter, ValidationError

from relax_cli.config.schema import DataSection
from relax_cli.errors import ConfigError, Problem

REASONING_GYM = "reasoning-gym:"
MOST_PROBLEMS = 20
"""Bad rows named one by one; the rest is counted."""
_SURROGATE = re.compile("[\ud800-\udfff]")
MOST_LINE_BYTES = 64 << 20
"""A longer line is no row, but most likely a JSON array."""
ROWS_PER_REPORT = 2048
"""Rows between two calls of `progress`."""


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


@dataclass(frozen=True)
class PromptScan:
    """What a look at every row found."""

    count: int
    """Prompts."""
    first: tuple[Prompt, ...]
    """The first ones."""


def load_prompts(section: DataSection, spec: str) -> list[Prompt]:
    """Read every prompt of `spec`: a JSONL or Parquet file, or `reasoning-gym:TASK?size=N&seed=S&param=value`.

    Raises:
        ConfigError: the data are missing, empty or have bad rows (each named by file and line), or there is
            no such task or parameter.
    """
    return list(scan_prompts(section, spec).first)


def scan_prompts(
    section: DataSection,
    spec: str,
    *,
    keep: int | None = None,
    check: Callable[[Prompt], Problem | None] | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> PromptScan:
    """Look at every row, keeping only the first `keep` (None: all): then memory does not grow with the file.

    Args:
        check: what else must be right about a prompt.
        progress: called now and then with the file's name and the part of it that is read.

    Raises:
        ConfigError: as for `load_prompts`; also what `check` found. Holds the first bad rows and a count of the others.
    """
    first: list[Prompt] = []
    problems: list[Problem] = []
    count = bad = 0
    for row in _generate(spec) if spec.startswith(REASONING_GYM) else _read_file(section, Path(spec), progress):
        problem = row if isinstance(row, Problem) else check(row) if check is not None else None
        if problem is not None:
            bad += 1
            if bad <= MOST_PROBLEMS:
                problems.append(problem)
        elif isinstance(row, Prompt):
            count += 1
            if keep is None or count <= keep:
                first.append(row)
    if bad > MOST_PROBLEMS:
        problems.append(_more_problems(spec, bad - MOST_PROBLEMS))
    if problems:
        raise ConfigError(problems)
    if not count:
        raise ConfigError(_empty(spec))
    return PromptScan(count, tuple(first))


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
        return [epochs(epoch)[index] for epoch, index in places]

    def _epoch(self, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(self.n)
        # Here, because checking a configuration reads prompts, too, and has no use for numpy.
        import numpy as np

        # Over its versions numpy keeps the raw bits of a seed, but not what `Generator.permutation` does.
        keys = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(self.n)
        order: list[int] = np.argsort(keys, kind="stable").tolist()
        return order


def _read_file(
    section: DataSection, path: Path, progress: Callable[[str, float], None] | None
) -> Iterator[Prompt | Problem]:
    if path.suffix == ".parquet":
        from relax_cli.data.parquet import read_parquet

        for number, row in enumerate(read_parquet(path, progress), 1):
            yield _prompt_of_row(section, row, f"{path}: row {number}")
        return
    try:
        yield from _read_jsonl(section, path, progress)
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


def _read_jsonl(
    section: DataSection, path: Path, progress: Callable[[str, float], None] | None
) -> Iterator[Prompt | Problem]:
    size, done = max(1, path.stat().st_size), 0
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE_BYTES), b""), 1):
            done += len(line)
            if progress is not None and number % ROWS_PER_REPORT == 0:
                progress(str(path), done / size)
            if len(line) == MOST_LINE_BYTES:
                got = f"more than {MOST_LINE_BYTES >> 20} MiB without a line break"
                yield _bad_row(f"{path}:{number}", "line is too long", got=got, expected="one JSON object a line")
                return
            if line.strip():
                yield _parse_row(section, line, f"{path}:{number}")


def _parse_row(section: DataSection, line: bytes, where: str) -> Prompt | Problem:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        text = line.decode(errors="replace").strip()
        return _bad_row(where, f"line is not JSON: {error}", got=text[:80], expected="one JSON object a line")
    if not isinstance(row, dict):
        return _bad_row(where, "line is not a JSON object", got=type(row).__name__, expected='{"input": …}')
    return _prompt_of_row(section, row, where)


def _prompt_of_row(section: DataSection, row: dict[str, Any], where: str) -> Prompt | Problem:
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
            got=_shown(content),
            expected='text, or [{"role": "user", "content": "…"}]',
        )
    if section.label_key is not None and not isinstance(label, str | int | float):
        return _bad_row(
            where,
            f"{section.label_key!r} is not text",
            got=_shown(label),
            expected="text or a number",
        )
    if not isinstance(metadata, dict):
        return _bad_row(where, f"{section.metadata_key!r} is not an object", got=_shown(metadata), expected="{…}")
    return Prompt(content, label if isinstance(label, str | None) else json.dumps(label), metadata, where)


def _shown(value: Any) -> str:
    # Parquet also holds what JSON has no word for.
    return json.dumps(value, default=str)[:80]


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
    return text.isascii() or not _SURROGATE.search(text)


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


def _more_problems(spec: str, count: int) -> Problem:
    return Problem(
        id="prompt-data-row",
        message=f"{count} more bad rows",
        option="--prompt-data",
        where=spec,
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
