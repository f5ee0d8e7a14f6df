"""Learning-rate schedules. No torch is imported here."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

Decay: TypeAlias = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, peak: float, floor: float, warmup: int, total: int, decay: Decay) -> float:
    """The rate of optimizer step `step`, counted from 0, of a run of `total` steps.

    Warm-up is `peak · (step + 1) / warmup`, so that its first step already learns. After it the rate decays from `peak`
    at step `warmup` towards `floor` at step `total`, which is never taken: with p = (step − warmup) / (total − warmup)
    it is `floor + (peak − floor) · (1 − p)` (linear) or `floor + (peak − floor) · (1 + cos πp) / 2` (cosine). These are
    the numbers of transformers' schedulers of the same names. Steps beyond the last one repeat its rate.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if decay == "constant":
        return peak
    passed = max(0, min(step, total - 1) - warmup) / max(1, total - warmup)
    left = 1 - passed if decay == "linear" else (1 + math.cos(math.pi * passed)) / 2
    return floor + (peak - floor) * left
