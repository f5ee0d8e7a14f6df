"""The base of every group of options, and the groups that several estimators share."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

LEAST_TEMPERATURE = 1e-4
SMALLEST, LARGEST = 1e-30, 1e38
"""Bounds of the absolute value of every number with a fraction, except 0."""
MOST = 10**12
"""Of any whole number: nothing that is counted here comes near it, and arithmetic with it stays exact."""


def option(default: Any, description: str, **limits: Any) -> Any:
    """A field of a section, with its help text and limits such as `ge=1`."""
    return Field(default, description=description, **limits)


class Section(BaseModel):
    """Base of every option group: frozen, unknown keys and numbers that are not finite refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def _is_within_bounds(cls, value: Any) -> Any:
        """Beyond these bounds products and squares overflow in the arithmetic of a run, or vanish; an empty item of a
        list would be the working folder, where items are paths."""
        if isinstance(value, tuple) and "" in value:
            raise ValueError("without empty items")
        if isinstance(value, int) and abs(value) > MOST:
            raise ValueError(f"at most {MOST:,}")
        if isinstance(value, float) and value and not SMALLEST <= abs(value) <= LARGEST:
            raise ValueError(f"between {SMALLEST:g} and {LARGEST:g}, or 0")
        return value


class ClipRange(Section):
    """Clipping range of an importance ratio."""

    eps_clip: float = option(0.2, "clip the ratio to [1 - eps_clip, 1 + eps_clip_high]", gt=0)
    eps_clip_high: float | None = option(None, "upper clip range; --eps-clip when unset", gt=0)

    @property
    def clip_high(self) -> float:
        """Upper clip range, `--eps-clip-high` or else `--eps-clip`."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high


class DualClipRange(ClipRange):
    """A clip range with a bound for negative advantages."""

    eps_clip_c: float | None = option(
        None, "dual clip: for a negative advantage A the loss is at most -c x A; off when unset", gt=1
    )


class ClipOptions(DualClipRange):
    """Clipping of PPO-like losses, whose lower bound must be above 0."""

    @field_validator("eps_clip")
    @classmethod
    def _is_below_one(cls, value: float) -> float:
        if value >= 1:
            raise ValueError("the clip range below 1 must be less than 1")
        return value


class GaeOptions(Section):
    """Discounting of generalised advantage estimation."""

    gamma: float = option(1.0, "discount factor per token", ge=0, le=1)
    lambd: float = option(1.0, "GAE lambda", ge=0, le=1)
    critic_lambd: float | None = option(None, "GAE lambda of the value targets; --lambd when unset", ge=0, le=1)
    length_adaptive_lambd_alpha: float | None = option(
        None, "alpha of the policy's lambda 1 - 1/(alpha x length) (VAPO); --lambd when unset", gt=0
    )
    bootstrap_truncated: bool = option(
        False, "bootstrap truncated responses with the critic's value of their last state"
    )


class GroupOptions(Section):
    """Group baselines."""

    disable_grpo_std_normalization: bool = option(
        False, "do not divide group advantages by the group's standard deviation"
    )
