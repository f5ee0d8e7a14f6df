"""Text for a screen of 80 columns: lines, tables, and problems without secrets."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from relax_cli.config.redact import scrubbed
from relax_cli.config.text import with_program
from relax_cli.errors import Problem

WIDTH = 80
PART = " " * 12
"""What stands below the second line of a part."""


def wrapped(text: str, indent: str = "    ") -> list[str]:
    """Lines of at most 80 columns, at spaces only."""
    return textwrap.wrap(
        text,
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


def counted(number: int, what: str) -> str:
    """`1 error`, `2 errors`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def shown_default(value: Any) -> str:
    """The default of an option, as help says it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unset" if value is None else str(value)


def problem_lines(problem: Problem, label: str = "", *, width: int | None = WIDTH) -> list[str]:
    """The four parts: what is wrong, where, got and expected, the fix. A fix may be typed: it is one line.

    `label` stands in place of the severity; a width of None breaks no lines at all.
    """
    places = problem.where
    if problem.count > 1:
        rest = problem.count - len(problem.places)
        # The first in full, of the others what differs: data.jsonl:1, :5, :9.
        file = problem.where.rpartition(":")[0]
        short = [place.removeprefix(file).removeprefix(": ") for place in problem.places[1:]]
        places = ", ".join([problem.where, *short]) + (f" and {rest:,} more" if rest else "")
    where = " from ".join(dict.fromkeys(part for part in (problem.option, places) if part))
    parts = {"where": where, "got": problem.got, "expected": problem.expected, "fix": with_program(problem.fix)}
    lines = [(f"{label or problem.severity}: {problem.message}  [{problem.id}]", "  ")]
    lines += [(f"  {name:<9} {text}", PART) for name, text in parts.items() if text]
    shown = []
    for line, indent in lines:
        whole = width is None or line.startswith("  fix ")
        shown += [line] if whole else wrapped(line, indent)
    return [scrubbed(line).replace("\n", f"\n{PART}") for line in shown]


def problems_data(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """Problems as JSON objects; `count` and `places` only where one was found more than once."""
    found: list[dict[str, Any]] = []
    for problem in problems:
        texts = asdict(replace(problem, fix=with_program(problem.fix)))
        del texts["count"], texts["places"]
        found.append({name: scrubbed(text) for name, text in texts.items()})
        if problem.count > 1:
            found[-1] |= {"count": problem.count, "places": [scrubbed(place) for place in problem.places]}
    return found


def problems_text(problems: Sequence[Problem], *, verdict_last: bool = False) -> str:
    """The verdict, then every problem in four parts; the other way round where the last lines are seen first."""
    errors = sum(p.severity == "error" for p in problems)
    numbers = {"error": errors, "warning": len(problems) - errors}
    counts = ", ".join(counted(number, what) for what, number in numbers.items() if number)
    verdict = f"{'not valid' if errors else 'valid'}: {counts or 'no problems'}"
    shown = sorted(problems, key=lambda p: p.severity == "error") if verdict_last else problems
    lines = [line for problem in shown for line in problem_lines(problem)]
    return "\n".join([*lines, verdict] if verdict_last else [verdict, *lines])
