"""Rules about the URL that judges samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from relax_cli.config.redact import scrubbed
from relax_cli.config.schema import Config
from relax_cli.errors import Problem

if TYPE_CHECKING:
    from relax_cli.preflight.rules.files import Found

REMOTE = "remote"
"""The `--rm-type` that asks `--rm-url`."""
EXAMPLE = "http://127.0.0.1:8000/judge"


def reward_url(config: Config) -> Found:
    """`--rm-type remote` and `--rm-url` need each other, and the URL is one that can be asked."""
    url, name = config.reward.rm_url, config.reward.rm_type
    if url is None and name != REMOTE:
        return None
    if url is None:
        return _problem("reward-url-missing", "--rm-type remote asks a URL, and none is given", f"--rm-url {EXAMPLE}")
    if name != REMOTE:
        return _problem(
            "reward-url-unused",
            f"--rm-url is given, but the reward is {name or 'another one'}, which asks no URL",
            "--rm-type remote, or drop --rm-url",
            got=url,
        )
    fault = url_fault(url)
    if not fault:
        return None
    return _problem(
        "reward-url-invalid",
        f"--rm-url {fault}",
        f"--rm-url {EXAMPLE}",
        got=url,
        expected="http://HOST:PORT/PATH, or https",
    )


def url_fault(url: str) -> str:
    """What makes a URL unusable; empty when nothing does."""
    if any(character.isspace() or not character.isprintable() for character in url):
        return "holds a blank or a control character"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        # Messages of the parser name the port or address, never the password.
        return f"is no URL: {error}" if "@" not in str(error) else "is no URL"
    if parts.scheme not in ("http", "https"):
        return f"has the scheme {parts.scheme!r}" if parts.scheme else "has no scheme"
    if not parts.hostname:
        return "names no host"
    if port == 0:
        return "has the port 0"
    return ""


def _problem(rule: str, message: str, fix: str, *, got: str = "", expected: str = "") -> Problem:
    return Problem(
        id=rule, message=message, fix=fix, option="--rm-url", got=scrubbed(got), expected=expected or "a URL"
    )


REWARD_RULES: tuple[Callable[[Config], Found], ...] = (reward_url,)
