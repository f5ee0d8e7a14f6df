"""What an environment of multi-turn episodes receives and returns."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol

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


class Environment(Protocol):
    """The environment of one episode; each episode makes its own, without arguments. Methods may be `async`.

    An environment may also have a method `close()`, which is called once when its episode has ended.
    """

    def reset(self, row: EnvRow) -> Observation | Awaitable[Observation]:
        """The prompt of the episode."""

    def step(self, response: str) -> tuple[Any, float, bool] | Awaitable[tuple[Any, float, bool]]:
        """Answer a response, given without special tokens and without the stop string that ended it.

        Returns:
            the observation that follows it, the reward of this turn, and whether the episode is done; a done one has
            no use for its observation.
        """
