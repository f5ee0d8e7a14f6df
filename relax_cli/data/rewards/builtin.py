"""The rewards that come with relax: declared here, and loaded as those of plugins are. Imports none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

REMOTE = "remote"
"""The `--rm-type` that asks `--rm-url`."""
HERE = "relax_cli.data.rewards"


@dataclass(frozen=True)
class Builtin:
    """A reward of relax."""

    function: str
    """`"module:function"` that judges one sample; where it is judged apart, or a class whose instances do."""
    parts: tuple[str, ...] | None = ()
    """What `--reward-key` may pick; None: known once it has judged."""
    needs_label: bool = True
    apart: bool = False
    """Whether it is judged in worker processes with a deadline."""
    deadline: float = 5.0
    """Seconds for a sample, where it is judged apart."""


BUILTINS: Mapping[str, Builtin] = {
    "code": Builtin(f"{HERE}.code:CodeJudge", ("reward", "passed", "timed_out", "unjudged"), apart=True, deadline=15.0),
    "exact": Builtin(f"{HERE}.text:exact"),
    "f1": Builtin(f"{HERE}.text:f1", ("reward", "exact")),
    "format": Builtin(f"{HERE}.text:tagged", needs_label=False),
    "json_schema": Builtin(f"{HERE}.text:json_schema", ("reward", "json", "unjudged"), apart=True),
    "math": Builtin(f"{HERE}.math:judge", ("reward", "correct", "unjudged"), apart=True),
    "multiple_choice": Builtin(f"{HERE}.text:multiple_choice", ("reward", "answered")),
    "reasoning_gym": Builtin(
        f"{HERE}.reasoning_gym:judge", ("reward", "score", "correct", "unjudged"), needs_label=False, apart=True
    ),
    "regex": Builtin(f"{HERE}.text:regex", ("reward", "unjudged"), apart=True),
    REMOTE: Builtin(f"{HERE}.remote:RemoteReward", None, needs_label=False),
}
BUILTIN_REWARDS: Mapping[str, str] = {name: reward.function for name, reward in BUILTINS.items()}


def url_fault(url: str) -> str:
    """What makes a URL unusable; empty when nothing does."""
    if any(character.isspace() or not character.isprintable() for character in url):
        return "contains a blank or a control character"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        # Messages of the parser name the port or address, never the password.
        return f"is not a URL: {error}" if "@" not in str(error) else "is not a URL"
    if parts.scheme not in ("http", "https"):
        return f"has the scheme {parts.scheme!r}" if parts.scheme else "has no scheme"
    if not parts.hostname:
        return "names no host"
    return "has the port 0" if port == 0 else ""
