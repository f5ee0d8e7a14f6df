"""Configuration as plain data without secrets, for dumps, logs and errors."""

from __future__ import annotations

import re
from typing import Any

from relax_cli.config.schema import Config

HIDDEN = "<redacted>"
_SECRET_NAME = re.compile(r"(key|token|password|secret)s?$", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(\w+://[^/\s:@]+):[^/\s@]+@")
# `input_key` and its like name a column of the data, not a credential.
_PLAIN_SECTIONS = frozenset({"data", "reward"})


def redacted(section: str, name: str, value: Any) -> Any:
    """The value, or `<redacted>` when its option is named like a secret; URL passwords are hidden always."""
    if not isinstance(value, str):
        return value
    is_column = section in _PLAIN_SECTIONS and name.endswith("_key")
    if value and _SECRET_NAME.search(name) and not is_column:
        return HIDDEN
    return _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", value)


def config_dump(config: Config) -> dict[str, dict[str, Any]]:
    """`section: {key: value}` in JSON types, secrets hidden. For people; to rebuild, use `model_dump`."""
    return {
        section: {name: redacted(section, name, value) for name, value in values.items()}
        for section, values in config.model_dump(mode="json").items()
    }
