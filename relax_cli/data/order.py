"""The order in which rollouts use prompts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PromptOrder:
    """Which of `n` prompts a rollout uses, as a pure function: a resumed run continues where it was.
    Every epoch uses each prompt once, in an order of its own; batches run across epoch borders."""

    n: int
    seed: int
    shuffle: bool
    mixture: tuple[tuple[int, float], ...] = ()
    """Size and weight of each of several sets, one after the other in the `n` prompts. An epoch of `n` places then
    gives each set its share of them, and a set repeats no prompt before all of its own were used."""

    def rows(self, rollout_id: int, batch: int) -> list[int]:
        """Prompt indices `[batch]` of rollout `rollout_id`."""
        return self.places(rollout_id * batch, batch)

    def places(self, first: int, count: int) -> list[int]:
        """Prompt indices `[count]` from place `first` of the endless order on."""
        epochs = functools.cache(self._epoch)
        places = (divmod(place, self.n) for place in range(first, first + count))
        return [epochs(epoch)[index] for epoch, index in places]

    def _epoch(self, epoch: int) -> Sequence[int]:
        if self.mixture:
            return self._mixed(epoch)
        return _shuffled(self.n, self.seed, epoch) if self.shuffle else range(self.n)

    def _mixed(self, epoch: int) -> Sequence[int]:
        first = 0
        places: list[tuple[float, int]] = []
        for number, ((size, _), share) in enumerate(zip(self.mixture, self.shares(), strict=True), 1):
            own = PromptOrder(size, self.seed + (number << 64), self.shuffle).rows(epoch, share)
            places += [((i + 0.5) / share, first + row) for i, row in enumerate(own)]
            first += size
        if self.shuffle:
            return [places[i][1] for i in _shuffled(self.n, self.seed, epoch)]
        return [row for _, row in sorted(places)]

    def shares(self) -> list[int]:
        """Places of an epoch that each set of the mixture has: by weight, and at least one."""
        total = sum(weight for _, weight in self.mixture)
        exact = [self.n * weight / total for _, weight in self.mixture]
        shares = [max(1, int(part)) for part in exact]
        while (left := self.n - sum(shares)) != 0:
            step = 1 if left > 0 else -1
            furthest = max(range(len(exact)), key=lambda i: step * (exact[i] - shares[i]) if shares[i] + step else -1e9)
            shares[furthest] += step
        return shares


def _shuffled(n: int, seed: int, epoch: int) -> list[int]:
    # Here, because checking a configuration reads prompts as well and has no use for numpy.
    import numpy as np

    # Over its versions numpy keeps the raw bits of a seed, but not what `Generator.permutation` does.
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    order: list[int] = np.argsort(keys, kind="stable").tolist()
    return order
