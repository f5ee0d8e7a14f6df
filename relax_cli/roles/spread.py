"""Count, mean, deviation and extremes of numbers that several workers hold parts of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Enough to merge parts exactly: deviations are kept around the part's own mean (Chan et al. 1979)."""

    count: int = 0
    total: float = 0.0
    deviation: float = 0.0
    """Sum of squared distances from the mean."""
    low: float = math.inf
    high: float = -math.inf

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        numbers = [float(v) for v in values]
        if not numbers:
            return Spread()
        total = math.fsum(numbers)
        mean = total / len(numbers)
        return Spread(len(numbers), total, math.fsum((v - mean) ** 2 for v in numbers), min(numbers), max(numbers))

    @staticmethod
    def merge(parts: Iterable[Spread]) -> Spread:
        """Spread of all numbers behind the parts."""
        kept = [part for part in parts if part.count]
        if not kept:
            return Spread()
        count, total = sum(p.count for p in kept), math.fsum(p.total for p in kept)
        mean = total / count
        deviation = math.fsum(p.deviation + p.count * (p.mean - mean) ** 2 for p in kept)
        return Spread(count, total, deviation, min(p.low for p in kept), max(p.high for p in kept))

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """Unbiased standard deviation, 0 for fewer than two numbers."""
        return math.sqrt(self.deviation / (self.count - 1)) if self.count > 1 else 0.0

    def metrics(self, name: str) -> dict[str, float]:
        """`name/mean`, `/std`, `/min` and `/max`."""
        if not self.count:
            return {}
        return {f"{name}/mean": self.mean, f"{name}/std": self.std, f"{name}/min": self.low, f"{name}/max": self.high}


def merge_spreads(shares: Sequence[dict[str, Spread]]) -> dict[str, Spread]:
    names = {name: None for share in shares for name in share}
    return {name: Spread.merge(share[name] for share in shares if name in share) for name in names}
