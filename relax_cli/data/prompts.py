"""Prompts from files, or from a reasoning-gym task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from relax_cli.config.schema import DataSection
from relax_cli.data.formats import Progress, read_rows
from relax_cli.data.rows import REWARD_KEY, prompt_of_row
from relax_cli.data.rows import Prompt as Prompt
from relax_cli.data.sources import generate, source_of, weights_of
from relax_cli.errors import ConfigError, Problem, RepeatedProblems, problem_kind

EMPTY = problem_kind("prompt-data-empty", "Data", "There is no prompt in the data.", option="--prompt-data")


class Prompts(list[Prompt]):
    """The prompts of one item or of several, one after the other."""

    mixture: tuple[tuple[int, float], ...] = ()
    """Prompts and weight of each item, where items have weights."""


def load_prompts(
    section: DataSection,
    specs: str | Sequence[str],
    fitting: Callable[[list[Prompt]], list[Prompt]] | None = None,
) -> Prompts:
    """Read every prompt of one item of `--prompt-data` (see docs/data.md), or of several.
    `fitting` leaves out the prompts of an item that are too long.
    Raises ConfigError: the data are missing, empty or have bad rows (each named by file and line), or there is no such
    task or parameter. Rows with the same fault are one problem."""
    items = [specs] if isinstance(specs, str) else specs
    weights = weights_of([source_of(item) for item in items])
    prompts, sizes, problems = Prompts(), [], RepeatedProblems()
    for item in items:
        read: list[Prompt] = []
        for row in read_prompts(section, item):
            if isinstance(row, Problem):
                problems.add(row)
            else:
                read.append(row)
        kept = read if fitting is None else fitting(read)
        prompts += kept
        sizes.append(len(kept))
    if found := problems.all():
        raise ConfigError(found)
    if nothing := [item for item, size in zip(items, sizes, strict=True) if not size]:
        raise ConfigError(empty(nothing[0]))
    prompts.mixture = tuple(zip(sizes, weights, strict=True)) if weights else ()
    return prompts


def read_prompts(section: DataSection, spec: str, progress: Progress | None = None) -> Iterator[Prompt | Problem]:
    """Every prompt of one item, or what is wrong with its row; one after the other in memory.
    Raises ConfigError: the data cannot be read at all."""
    source = source_of(spec)
    if source.is_task:
        chat: dict[str, Any] = {"system": section.system_prompt, "template": section.chat_template_kwargs}
        found: Iterable[Prompt | Problem] = (replace(p, **chat) for p in generate(source.place))
    else:
        needed = [key for key in (section.input_key, section.label_key) if key is not None]
        optional = [section.metadata_key, section.tools_key, REWARD_KEY]
        files = (read_rows(file, needed, optional, progress) for file in source.files())
        rows = chain.from_iterable(files)
        found = (row if isinstance(row, Problem) else prompt_of_row(section, row[1], row[0]) for row in rows)
    yield from islice(found, *source.rows)


def empty(spec: str) -> Problem:
    """The problem of data without a prompt."""
    fix = "--prompt-data FILE.jsonl with at least one row"
    return EMPTY("there is no prompt in the data", got=spec, expected="at least one prompt", fix=fix)
