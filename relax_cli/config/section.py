"""The base of every group of options, and the groups that several estimators share."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

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


class ClipRange(Section):
    """Clipping range of an importance ratio."""

    eps_clip: float = Field(0.2, gt=0, description="clip the ratio to [1 - eps_clip, 1 + eps_clip_high]")
    eps_clip_high: float | None = Field(None, gt=0, description="upper clip range; --eps-clip when unset")

    @property
    def clip_high(self) -> float:
        """Upper clip range, `--eps-clip-high` or else `--eps-clip`."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high


class DualClipRange(ClipRange):
    """A clip range with a bound for negative advantages."""

    eps_clip_c: float | None = Field(
        None, gt=1, description="dual clip: for a negative advantage A the loss is at most -c x A; off when unset"
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

    gamma: float = Field(1.0, ge=0, le=1, description="discount factor per token")
    lambd: float = Field(1.0, ge=0, le=1, description="GAE lambda")
    critic_lambd: float | None = Field(
        None, ge=0, le=1, description="GAE lambda of the value targets; --lambd when unset"
    )
    length_adaptive_lambd_alpha: float | None = Field(
        None, gt=0, description="alpha of the policy's lambda 1 - 1/(alpha x length) (VAPO); --lambd when unset"
    )
    bootstrap_truncated: bool = Field(
        False, description="bootstrap truncated responses with the critic's value of their last state"
    )


class GroupOptions(Section):
    """Group baselines."""

    disable_grpo_std_normalization: bool = Field(
        False, description="do not divide group advantages by the group's standard deviation"
    )
