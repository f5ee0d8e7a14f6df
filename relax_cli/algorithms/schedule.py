"""Learning-rate schedules. No torch is imported here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from relax_cli.config.schema import OptimizerSection


@dataclass(frozen=True)
class Schedule:
    """Adam's options, and the learning rate of every optimizer step of a run."""

    section: OptimizerSection
    lr: float
    """At the peak; the shape of the schedule comes from `section`."""
    warmup_iters: int
    """Optimizer steps of linear warm-up."""
    decay_iters: int
    """Optimizer steps of the run; the rate decays towards `min_lr` after them."""

    def rate(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0.

        Warm-up is `lr · (step + 1) / warmup`, so that its first step already learns. After it the rate decays from `lr`
        at step `warmup` towards `min_lr` at step `total`, which is never taken: with p = (step − warmup) / (total −
        warmup) it is `min_lr + (lr − min_lr) · (1 − p)` (linear) or `min_lr + (lr − min_lr) · (1 + cos πp) / 2`
        (cosine). These are the numbers of transformers' schedulers of the same names. Steps beyond the last one repeat
        its rate.
        """
        peak, floor, warmup, total = self.lr, self.section.min_lr, self.warmup_iters, self.decay_iters
        if step < warmup:
            return peak * (step + 1) / warmup
        if self.section.lr_decay_style == "constant":
            return peak
        passed = max(0, min(step, total - 1) - warmup) / max(1, total - warmup)
        left = 1 - passed if self.section.lr_decay_style == "linear" else (1 + math.cos(math.pi * passed)) / 2
        return floor + (peak - floor) * left
