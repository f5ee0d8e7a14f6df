"""Notices a policy that has died: by itself a run would continue for hours on it."""

from __future__ import annotations

import math
from collections.abc import Mapping

PATIENCE = 3
"""Rollouts in a row after which it is worth a warning."""


class PolicyHealth:
    """Watches the metrics of every rollout."""

    def __init__(self) -> None:
        self.is_alive = True
        """Whether the last rollout was one to learn from."""
        self._best: tuple[float, int] | None = None
        """Highest mean reward, and its step."""
        self._dead = 0
        self._skipped = 0

    def observe(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """A warning, when a person should know of it; once for each death."""
        mean = metrics["reward/mean"]
        is_flat = metrics["reward/min"] == metrics["reward/max"]
        fell = self._best is not None and mean < self._best[0]
        self.is_alive = not (is_flat and fell) and math.isfinite(mean)
        self._dead = 0 if self.is_alive else self._dead + 1
        if self._best is None or mean > self._best[0]:
            self._best = (mean, step)
        # A rollout of the critic alone has neither.
        all_skipped = metrics.get("actor/skipped_steps", 0) > 0 and metrics["actor/optimizer_steps"] == 0
        self._skipped = self._skipped + 1 if all_skipped else 0
        if self._dead == PATIENCE:
            best, where = self._best
            return (
                f"every sample of the last {PATIENCE} rollouts got the reward {mean:g}; step {where} had a mean of "
                f"{best:g}: the policy may have died. If so, start again from an earlier pair with a lower --lr"
            )
        if self._skipped == PATIENCE:
            return (
                f"all optimizer steps of the actor were skipped in the last {PATIENCE} rollouts, because of gradients "
                "that are NaN or infinite: nothing is learned. A lower --lr or --clip-grad may help"
            )
        return None
