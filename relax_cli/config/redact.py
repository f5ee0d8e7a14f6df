"""Configuration as plain data without secrets, for dumps, logs, errors and commands to type."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from relax_cli.errors import Problem

if TYPE_CHECKING:
    from relax_cli.config.schema import Config

HIDDEN = "<redacted>"

_SECRET_WORDS = frozenset(
    {"token", "password", "passwd", "passphrase", "secret", "apikey", "credential", "authorization"}
)
_SECRET_ENDS = frozenset({"key", "keys", "tokens", "passwords", "secrets", "credentials", "auth"})
_COLUMNS = "input_key|label_key|metadata_key|reward_key"
"""They name a column of the data, not a credential."""
_PLAIN_SECTIONS = frozenset({"data", "reward"})

# All repetitions are bounded: texts come from anywhere, and an unbounded pattern takes minutes on a long line.
# A path keeps only one of the slashes. Digits after the colon are a port, unless an @ follows.
_SCHEME = r"(?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,30}:/{1,2}"
_URL_PASSWORD = re.compile(
    rf"(?P<start>{_SCHEME}[^/\s:@\"']{{0,200}}):(?P<secret>(?!\d{{1,5}}(?:/|$))[^\s\"']{{0,2000}})@", re.IGNORECASE
)
_URL_USER = re.compile(rf"(?P<start>{_SCHEME})(?P<secret>[^/\s:@\"'<]{{1,2000}})@", re.IGNORECASE)
# `max_tokens: 512` is a number of tokens.
_NAMED = (
    r"(?:tokens(?![\"']?\s{0,9}[=:]?\s{0,9}\d)|token(?!s)"
    r"|(?:passwd|password|passphrase|secret|credential|api[_-]?key|access[_-]?key)s?)"
)
_SECRET_GIVEN = re.compile(
    rf"(?P<name>(?:{_NAMED}|(?<![\w-])(?!(?:{_COLUMNS})\b)[\w-]{{0,60}}[_-]key)[\"']?\s{{0,9}}[=:]\s{{0,9}})"
    r"(?:(?P<quote>[\"']).{0,2000}?(?P=quote)|[\"']?[^\s\"',}&]+)",
    re.IGNORECASE,
)
_SECRET_QUERY = re.compile(
    r"(?P<name>[?&][\w.-]{0,60}?(?:key|token|secret|passw|pwd|sig|auth|credential|code)[\w.-]{0,60}=)[^\s&\"'#]+",
    re.IGNORECASE,
)
_SECRET_FLAG = re.compile(
    rf"(?P<name>(?<![\w-])--(?!(?:{_COLUMNS.replace('_', '-')})\b)[\w-]{{0,60}}(?:{_NAMED}|-key)\s{{1,9}})(?!--)"
    r"(?:\"[^\"]{0,2000}\"|'[^']{0,2000}'|\S+)",
    re.IGNORECASE,
)
_SECRET_HEADER = re.compile(
    r"(?P<name>\bauthorization[\"']?\s{0,9}[:=]\s{0,9}[\"']?(?:(?:basic|bearer|digest|token)\s{1,9})?|\bbearer\s{1,9})"
    r"(?!(?:basic|bearer|digest|token)\s)[\w.~+/=-]+",
    re.IGNORECASE,
)
_SECRET_SHAPE = re.compile(r"\b(?:sk-|hf_|gh[opsu]_|github_pat_|xox[abp]-|AKIA)[A-Za-z0-9_-]{12,}")

_PLACEHOLDER = re.compile(r"\$\{RELAX_[A-Z0-9_]+:\?[^}]*\}")
_SHORTEST = 4
"""Shorter values are not looked for in texts: they would match anything."""


def is_secret_name(section: str, name: str) -> bool:
    """Whether an option is named like a secret: `hf_token`, `api_key`, `db_password_file`."""
    words = re.split(r"[_\W]+", name.lower())
    if section in _PLAIN_SECTIONS and words[-1] == "key":
        return False
    return not _SECRET_WORDS.isdisjoint(words) or words[-1] in _SECRET_ENDS


def redacted(section: str, name: str, value: Any) -> Any:
    """The value, or `<redacted>` when its option is named like a secret; secrets in URLs are hidden always."""
    if isinstance(value, Mapping):
        return {key: _in_object(section, str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(section, name, item) for item in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if value and is_secret_name(section, name) else scrubbed(value)


def _in_object(section: str, key: str, value: Any) -> Any:
    # Free-form objects have no types: a number may also be a password.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and is_secret_name(section, key) and not key.lower().endswith("tokens"):
        return HIDDEN
    return redacted(section, key, value)


def scrubbed(text: str) -> str:
    """Text for a screen without passwords in URLs and headers, and without values given to a name like `token`."""
    text = _URL_PASSWORD.sub(rf"\g<start>:{HIDDEN}@", text)
    text = _URL_USER.sub(rf"\g<start>{HIDDEN}@", text)
    text = _SECRET_QUERY.sub(rf"\g<name>{HIDDEN}", text)
    text = _SECRET_HEADER.sub(rf"\g<name>{HIDDEN}", text)
    text = _SECRET_FLAG.sub(rf"\g<name>{HIDDEN}", text)
    text = _SECRET_GIVEN.sub(rf"\g<name>\g<quote>{HIDDEN}\g<quote>", text)
    return _SECRET_SHAPE.sub(HIDDEN, text)


def config_dump(config: Config) -> dict[str, dict[str, Any]]:
    """`section: {key: value}` in JSON types, secrets hidden. For people; to rebuild, use `model_dump`."""
    return {
        section: {name: redacted(section, name, value) for name, value in values.items()}
        for section, values in config.model_dump(mode="json").items()
    }


def secrets_of(config: Config) -> frozenset[str]:
    """The secret values themselves, so that they are found in texts that others wrote."""
    values = [(section, *item) for section, body in config.model_dump(mode="json").items() for item in body.items()]
    found = {secret for section, name, value in values for secret in _secrets(section, name, value)}
    return frozenset(secret for secret in {*found, *map(unquote, found)} if len(secret) >= _SHORTEST)


def _secrets(section: str, name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets(section, str(key), item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secrets(section, name, item)
    elif isinstance(value, str):
        if is_secret_name(section, name):
            yield value
        for pattern in (_URL_PASSWORD, _URL_USER):
            yield from (match["secret"] for match in pattern.finditer(value))


def hide(problem: Problem, secrets: Collection[str]) -> Problem:
    """The problem without any of these values in its texts."""
    # The longest first, because one may be a part of another.
    longest_first = sorted(secrets, key=len, reverse=True)

    def hidden(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(hidden, value))
        if isinstance(value, str):
            for secret in longest_first:
                value = value.replace(secret, HIDDEN)
        return value

    return replace(problem, **{item.name: hidden(getattr(problem, item.name)) for item in fields(problem)})


def placeholder(name: str) -> str:
    """What a printed command has in place of a secret: the shell puts in `RELAX_NAME`, or says that it is not set."""
    return f"${{RELAX_{name.upper()}:?a secret that is not printed here}}"


def shell_join(words: Sequence[str]) -> str:
    """The words as one line for a shell, placeholders ready to expand."""
    return " ".join(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    if not _PLACEHOLDER.search(word):
        return shlex.quote(word)
    parts = _PLACEHOLDER.split(word)
    escaped = (re.sub(r'([\\"$`])', r"\\\1", part) for part in parts)
    found = iter([*_PLACEHOLDER.findall(word), ""])
    return '"' + "".join(part + next(found) for part in escaped) + '"'
