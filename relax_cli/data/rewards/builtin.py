"""The rewards that come with relax, by name; imports none of them."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

REMOTE = "remote"
"""The `--rm-type` that asks `--rm-url`."""
BUILTIN_REWARDS: Mapping[str, str] = {
    "exact": "relax_cli.data.rewards.exact:exact",
    "math": "relax_cli.data.rewards.math:MathReward",
    "reasoning_gym": "relax_cli.data.rewards.reasoning_gym:ReasoningGymReward",
    REMOTE: "relax_cli.data.rewards.remote:RemoteReward",
}
"""`"module:function"`, or a class whose instances are called (and closed, where they have a pool)."""
BUILTIN_PARTS: Mapping[str, tuple[str, ...]] = {
    "exact": (),
    "math": ("reward", "correct", "unjudged"),
    "reasoning_gym": ("reward", "score", "correct"),
}
"""What `--reward-key` may pick; those of a server, a file or a plugin are known once it has judged."""
LABEL_REWARDS = frozenset({"exact", "math"})
"""Rewards that compare the response with a label."""


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
