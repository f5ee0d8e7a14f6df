"""The base of every group of options."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

LEAST_TEMPERATURE = 1e-4
SMALLEST, LARGEST = 1e-30, 1e38
"""Bounds of the absolute value of every number with a fraction, except 0."""
MOST = 10**12
"""Of any whole number: nothing that is counted here comes near it, and arithmetic with it stays exact."""


class Section(BaseModel):
    """Base of every option group: frozen, unknown keys and numbers that are not finite refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def _is_within_bounds(cls, value: Any) -> Any:
        """Beyond these bounds products and squares overflow in the arithmetic of a run, or vanish."""
        if isinstance(value, int) and abs(value) > MOST:
            raise ValueError(f"at most {MOST:,}")
        if isinstance(value, float) and value and not SMALLEST <= abs(value) <= LARGEST:
            raise ValueError(f"between {SMALLEST:g} and {LARGEST:g}, or 0")
        return value
