"""Text for a screen: what others wrote does nothing to a terminal, and commands name the program as it was typed."""

from __future__ import annotations

import json
import os
import re
import reprlib
import shlex
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters but for tab and line feed, what turns the direction of text round, half surrogate pairs."""
_COMMAND = re.compile(
    r"(?<![\w./-])(?<!-m )(?:pip (?=(?:un)?install )|relax (?=(?:train|validate-config|checkpoint|plugins|recipes"
    r"|quickstart|doctor|eval|report|rollouts|replay)\b))"
)


def printable(text: str) -> str:
    """The text with control characters written out, such as `\\x1b`."""
    codes = set(map(ord, _UNPRINTABLE.findall(text)))
    return text.translate({code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in codes})


def shortened(text: str, most: int) -> str:
    """The text on one line, at most so many characters of it."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def in_json(value: Any, most: int = 200) -> str:
    """A value as JSON spells it (`true`, `null`, `NaN`), at most so many characters of it; a text as it is."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError):  # in a circle, with keys that are no text, or very deep
        text = reprlib.repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


class DoubleKey(ValueError):
    """An object has one key twice."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the key {name!r} is given twice")
        self.name = name


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` of JSON that others wrote. Raises DoubleKey."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise DoubleKey(next(name for name in names if names.count(name) > 1))
    return found


def with_program(text: str) -> str:
    """The text, in which commands of relax start with `program`, and those of pip with `pip`."""
    return _COMMAND.sub(lambda command: f"{pip() if command[0] == 'pip ' else program()} ", text)


@cache
def program() -> str:
    """What to type to run this program: `relax`, or its path where that is not the one on `PATH`."""
    typed = Path(sys.argv[0])
    if typed == Path(__file__).parent.parent / "__main__.py":
        return f"{_shortest('python', Path(sys.executable))} -m relax_cli"
    return _shortest("relax", typed) if typed.name == "relax" else "relax"


@cache
def pip() -> str:
    """What to type to install something next to this program."""
    typed, module, _ = program().partition(" -m ")
    tool, python = (Path(sys.argv[0]).with_name(name) for name in ("pip", "python"))
    if not module and tool.exists():
        return _shortest("pip", tool)
    if not module and (typed == "relax" or not python.exists()):
        return "pip"
    return f"{typed if module else shlex.quote(str(python))} -m pip"


def _shortest(name: str, path: Path) -> str:
    """The name, where it is found on `PATH` as this file, or the path."""
    on_path = shutil.which(name)
    is_on_path = on_path is not None and os.path.abspath(on_path) == os.path.abspath(path)
    return name if is_on_path else shlex.quote(str(path))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, without the padding that would end a line in blanks."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
