"""What an environment of multi-turn episodes receives; `docs/environments.md` has its methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relax_cli.data.rows import Messages

Observation = str | Messages
"""Text, or (with `--apply-chat-template`, where text is a user message) chat messages with `role` and `content`."""


@dataclass(frozen=True)
class EnvRow:
    """The row of the data that an episode starts from: a copy, which may be changed."""

    prompt: Observation
    label: Any
    """The row's label, None without `--label-key`."""
    metadata: dict[str, Any]
    seed: int
    """Of this sample, the same in every run: for an environment that draws numbers."""
