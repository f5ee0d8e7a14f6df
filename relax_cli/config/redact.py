"""Configuration as plain data without secrets, for dumps, logs and errors."""

from __future__ import annotations

import re
from typing import Any

from relax_cli.config.schema import Config

HIDDEN = "<redacted>"
_SECRET_NAME = re.compile(r"(key|token|password|secret)s?$", re.IGNORECASE)
# A path keeps only one of the slashes.
_URL_PASSWORD = re.compile(r"(\w+:/{1,2}[^/\s:@]+):[^/\s@]+@")
_SECRET_GIVEN = re.compile(
    r"(?P<name>(?:token|passwd|password|secret|api[_-]?key|access[_-]?key)s?[\"']?\s*[=:]\s*[\"']?)[^\s\"',}&]+",
    re.IGNORECASE,
)
# `input_key` and its like name a column of the data, not a credential.
_PLAIN_SECTIONS = frozenset({"data", "reward"})


def redacted(section: str, name: str, value: Any) -> Any:
    """The value, or `<redacted>` when its option is named like a secret; secrets in URLs are hidden always."""
    if isinstance(value, list | tuple):
        return [redacted(section, name, item) for item in value]
    if not isinstance(value, str):
        return value
    is_column = section in _PLAIN_SECTIONS and name.endswith("_key")
    if value and _SECRET_NAME.search(name) and not is_column:
        return HIDDEN
    return scrubbed(value)


def scrubbed(text: str) -> str:
    """Text for a screen without URL passwords and without values that are given to a name like `token`."""
    return _SECRET_GIVEN.sub(rf"\g<name>{HIDDEN}", _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", text))


def config_dump(config: Config) -> dict[str, dict[str, Any]]:
    """`section: {key: value}` in JSON types, secrets hidden. For people; to rebuild, use `model_dump`."""
    return {
        section: {name: redacted(section, name, value) for name, value in values.items()}
        for section, values in config.model_dump(mode="json").items()
    }
