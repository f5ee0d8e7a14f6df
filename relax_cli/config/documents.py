"""YAML that anybody may have written: read within limits, as ordinary Python values."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError

from relax_cli.errors import ConfigError, Problem, problem_kinds

THEME = "Reading the configuration"
MOST_BYTES = 128 << 10
MOST_LEVELS = 20
MOST_VALUES = 10_000
MOST_BITS = 64

declare = problem_kinds(THEME, option="--recipe")
SYNTAX = declare(
    "recipe-syntax", "The recipe is not a YAML mapping of sections with indented keys. The place is file and line."
)
DUPLICATE_KEY = declare(
    "duplicate-key", "A key stands twice in one section of a recipe. YAML readers would silently take the last one."
)
TOO_LARGE = declare(
    "recipe-limit",
    f"A recipe has at most {MOST_BYTES >> 10} KiB, and one of its values at most {MOST_LEVELS} levels and "
    f"{MOST_VALUES:,} parts, aliases included.",
)


class TooLarge(ValueError):
    """A value has more levels or parts than any option needs."""


def read_document(path: Path) -> CommentedMap:
    """The mapping in a YAML file, with the line of each key; an empty one where the file is empty.
    Raises ConfigError: it is not such a file, or it is too large."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(_too_large(f"recipe {path} has more than {MOST_BYTES >> 10} KiB", str(path)))
        document = YAML().load(content.decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(SYNTAX(f"recipe cannot be read: {error}", where=str(path), fix="give a YAML file")) from None
    except UnicodeDecodeError as error:
        raise ConfigError(SYNTAX(f"recipe is not UTF-8: {error}", where=str(path), fix="save it as UTF-8")) from None
    except MarkedYAMLError as error:
        raise ConfigError(_not_yaml(path, error)) from None
    except RecursionError:
        raise ConfigError(_too_large(f"recipe {path} is nested too deeply", str(path))) from None
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 ruamel raises anything for odd merge keys, tags and numbers
        message = f"recipe has something that YAML cannot read: {type(error).__name__}: {str(error)[:200]}"
        raise ConfigError(SYNTAX(message, where=str(path), fix="correct or remove it")) from None
    if document is None:
        return CommentedMap()
    if not isinstance(document, CommentedMap):
        message = f"recipe {path} is not a mapping of sections"
        raise ConfigError(SYNTAX(message, where=f"{path}:1", fix="write `section:` and indented keys"))
    return document


def line_of(mapping: CommentedMap, key: Any, path: Path) -> str:
    """`FILE:LINE` of a key; the file alone for one that a merge key brought in."""
    try:
        return f"{path}:{mapping.lc.key(key)[0] + 1}"
    except (KeyError, TypeError, AttributeError):
        return str(path)


def yaml_value(text: str) -> Any:
    """A value as YAML 1.2 reads it; what is not YAML, or too large, stays text."""
    if len(text) > MOST_BYTES:
        return text
    try:
        return plain(YAML(typ="safe", pure=True).load(io.StringIO(text)))
    except Exception:  # noqa: BLE001 as above; a text that is not YAML is what was typed
        return text


def plain(value: Any) -> Any:
    """ruamel's types as ordinary Python values.
    Raises TooLarge: it has too many levels or parts, which aliases can make out of little."""
    return _plain(value, MOST_LEVELS, [MOST_VALUES])


def _plain(value: Any, levels: int, left: list[int]) -> Any:
    left[0] -= 1
    if levels < 0 or left[0] < 0:
        raise TooLarge("too many levels or parts")
    if isinstance(value, dict):
        return {_plain(k, levels - 1, left): _plain(v, levels - 1, left) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        parts = [_plain(v, levels - 1, left) for v in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > MOST_BITS:
        return f"an integer of {value.bit_length()} bits"
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _not_yaml(path: Path, error: MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
    reason = str(error.problem or error.context).partition(" with value")[0]
    if isinstance(error, DuplicateKeyError):
        message = f"recipe has a {reason.removeprefix('found ')}"
        return DUPLICATE_KEY(message, where=where, fix="keep one of the two")
    return SYNTAX(f"recipe is not valid YAML: {reason}", where=where, fix="correct this line")


def _too_large(message: str, where: str) -> Problem:
    return TOO_LARGE(message, where=where, fix="write the options that differ from the defaults, and nothing else")
