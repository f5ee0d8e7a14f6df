"""Text for a screen of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

WIDTH = 80


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


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, without the padding that would end a line in blanks."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def counted(number: int, what: str) -> str:
    """`1 error`, `2 errors`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def shown_default(value: Any) -> str:
    """The default of an option, as help says it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unset" if value is None else str(value)
