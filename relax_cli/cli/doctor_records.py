"""One row of `relax doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """What was looked at and how it is."""

    name: str
    status: Literal["ok", "note", "problem"]
    found: str
    fix: str = ""
    """What to type; empty when it is ok."""
