"""Prompts from a JSON Lines or Parquet file, or from a reasoning-gym task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from relax_cli.config.schema import DataSection
from relax_cli.data.formats import Progress, read_rows
from relax_cli.data.reasoning_gym import REASONING_GYM, generate
from relax_cli.data.rows import TOOLS, prompt_of_row
from relax_cli.data.rows import Prompt as Prompt
from relax_cli.errors import ConfigError, Problem, RepeatedProblems, problem_kind

EMPTY = problem_kind("prompt-data-empty", "Data", "There is no prompt in the data.", option="--prompt-data")


@dataclass(frozen=True)
class PromptScan:
    """What a look at every row found."""

    count: int
    """Prompts."""
    first: tuple[Prompt, ...]
    """The first ones."""


def load_prompts(section: DataSection, spec: str) -> list[Prompt]:
    """Read every prompt of `spec`: a JSON Lines or Parquet file, or `reasoning-gym:TASK?size=N&seed=S&param=value`.

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
    progress: Progress | None = None,
) -> PromptScan:
    """Look at every row, keeping only the first `keep` (None: all): then memory does not grow with the file.

    Args:
        check: what else must be right about a prompt.
        progress: called now and then with the file's name and the part of it that is read.

    Raises:
        ConfigError: as for `load_prompts`; also what `check` found. Rows with the same fault are one problem.
    """
    first: list[Prompt] = []
    problems = RepeatedProblems()
    count = 0
    for row in read_prompts(section, spec, progress):
        problem = row if isinstance(row, Problem) else check(row) if check is not None else None
        if problem is not None:
            problems.add(problem)
        elif isinstance(row, Prompt):
            count += 1
            if keep is None or count <= keep:
                first.append(row)
    if found := problems.all():
        raise ConfigError(found)
    if not count:
        raise ConfigError(empty(spec))
    return PromptScan(count, tuple(first))


def read_prompts(section: DataSection, spec: str, progress: Progress | None = None) -> Iterator[Prompt | Problem]:
    """Every prompt of `spec`, or what is wrong with its row; one after the other in memory.

    Raises:
        ConfigError: the data cannot be read at all.
    """
    if spec.startswith(REASONING_GYM):
        yield from generate(spec)
        return
    needed = [key for key in (section.input_key, section.label_key) if key is not None]
    for row in read_rows(Path(spec), needed, [section.metadata_key, TOOLS], progress):
        yield row if isinstance(row, Problem) else prompt_of_row(section, row[1], row[0])


def empty(spec: str) -> Problem:
    """The problem of data without a prompt."""
    fix = "--prompt-data FILE.jsonl with at least one row"
    return EMPTY("there is no prompt in the data", got=spec, expected="at least one prompt", fix=fix)
