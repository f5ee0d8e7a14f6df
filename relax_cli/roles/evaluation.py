"""Small results that roles hand to the schedule. Importing them imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relax_cli.roles.spread import Spread


@dataclass(frozen=True)
class EvalShare:
    """What one worker found on its part of a held-out set."""

    rewards: Spread
    examples: list[dict[str, Any]]
    """`prompt`, `response`, `label` and `reward` of the first few."""
