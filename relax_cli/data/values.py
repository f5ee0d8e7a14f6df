"""What values of a data file mean: the same from JSON Lines and from Parquet, which has more types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date, time
from decimal import Decimal
from math import isfinite, isnan
from typing import Any

from relax_cli.config.text import in_json

DEEPEST = 64
_SURROGATE = re.compile("[\ud800-\udfff]")


class Unusable(Exception):
    """A value that has no meaning here; the text is a predicate: `is true`."""

    def __init__(self, predicate: str) -> None:
        # It may name a key of the user's.
        super().__init__(printable(predicate))


def text_of(value: Any) -> str:
    """Text as it is, and bytes that are UTF-8.
    Raises Unusable: it is neither, or has half a surrogate pair, which no tokenizer and no file takes."""
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            raise Unusable("is bytes that are not UTF-8") from error
    if not isinstance(value, str):
        raise Unusable(f"is not text, but {_kind(value)}")
    if not value.isascii() and _SURROGATE.search(value):
        raise Unusable("has half a surrogate pair, which is not a character")
    return value


def label_of(value: Any) -> str:
    """A label as text: a number as people write it (46.0 is `46`, 1e-7 is `0.0000001`), a date in ISO form.
    Raises Unusable: it is null, true or false, not a finite number, a list or an object."""
    if isinstance(value, bool) or value is None:
        raise Unusable(f"is not text or a number, but {_kind(value)}")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float | Decimal):
        if not isfinite(value):
            raise Unusable(f"is not text or a number, but {_kind(value)}")
        # Not normalize(), which rounds to 28 digits.
        digits = format(Decimal(repr(value)) if isinstance(value, float) else value, "f") if value else "0"
        return digits.rstrip("0").rstrip(".") if "." in digits else digits
    if isinstance(value, date | time):
        return value.isoformat()
    return text_of(value)


def label_value(value: Any) -> str | list[Any] | dict[str, Any]:
    """A label: a list or an object as plain JSON, true and false as these words, anything else as in `label_of`.
    Raises Unusable: it is null, not a finite number, or has a part without a JSON form."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple | dict):
        found: list[Any] | dict[str, Any] = _plain(value, "", 0)
        return found
    return label_of(value)


def plain_json(value: Any) -> Any:
    """A value as plain JSON, without the keys that are null: Arrow gives every object the keys of all.
    Raises Unusable: something in it has no JSON form; the text then begins with its key."""
    return _without_nulls(_plain(value, "", 0))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def metadata_of(value: Any) -> dict[str, Any]:
    """Metadata as plain JSON: dates are ISO text, decimals numbers, and NaN, pandas' missing value, is null.
    Raises Unusable: it is not an object, or something in it has no JSON form; the text then begins with its key."""
    plain = {} if value is None else _plain(value, "", 0)
    if not isinstance(plain, dict):
        raise Unusable(f"is not an object, but {_kind(value)}")
    return plain


def sendable(value: Any) -> Any:
    """A value of any kind in the nearest JSON form: text for objects, null for what is not a number."""
    if isinstance(value, dict):
        return {str(name): sendable(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [sendable(item) for item in value]
    if isinstance(value, float):
        return value if isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def shown(value: Any) -> str:
    """A value of a file in one short line without control characters."""
    return printable(in_json(value, 80))


def printable(text: str) -> str:
    """Text in which control characters and half surrogate pairs are spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _plain(value: Any, key: str, depth: int) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and isnan(value):
        return None
    if isinstance(value, float | Decimal):
        if not isfinite(value):
            raise Unusable(f"{key or 'it'} is {_kind(value)}, which JSON does not have")
        is_whole = isinstance(value, Decimal) and value == value.to_integral_value()
        return int(value) if is_whole else float(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if depth == DEEPEST:
        raise Unusable(f"{key} is nested more than {DEEPEST} deep")
    if isinstance(value, list) and value and all(isinstance(item, tuple) for item in value):
        # A map of Arrow.
        pairs, value = value, dict(value)
        if len(value) < len(pairs):
            raise Unusable(f"{key or 'it'} has a key twice")
    if isinstance(value, dict):
        return {name: _plain(item, f"{key}.{name}" if key else name, depth + 1) for name, item in _texts(value, key)}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{key}[{index}]", depth + 1) for index, item in enumerate(value)]
    try:
        return text_of(value)
    except Unusable as error:
        raise Unusable(f"{key or 'it'} {error}") from error


def _texts(value: dict[Any, Any], key: str) -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        try:
            yield label_of(name), item
        except Unusable as error:
            raise Unusable(f"a key of {key or 'it'} {error}") from error


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float | Decimal) and not isfinite(value):
        return "NaN" if isnan(value) else "infinite"
    names = {dict: "an object", list: "a list", bytes: "bytes", int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")
