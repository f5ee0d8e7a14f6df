"""Text for a screen of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

WIDTH = 80


def wrapped(text: str, indent: str = "    ") -> list[str]:
    """Lines of at most 80 columns, at spaces only."""
    lines: Iterable[str] = textwrap.wrap(
        text,
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    )
    return list(lines)
