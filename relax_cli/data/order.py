"""The order in which rollouts use prompts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PromptOrder:
    """Which of `n` prompts a rollout uses, as a pure function: a resumed run continues where it was.

    Every epoch uses each prompt once, in an order of its own; batches run across epoch borders.
    """

    n: int
    seed: int
    shuffle: bool

    def rows(self, rollout_id: int, batch: int) -> list[int]:
        """Prompt indices `[batch]` of rollout `rollout_id`."""
        epochs = functools.cache(self._epoch)
        places = (divmod(place, self.n) for place in range(rollout_id * batch, (rollout_id + 1) * batch))
        return [epochs(epoch)[index] for epoch, index in places]

    def _epoch(self, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(self.n)
        # Here, because checking a configuration reads prompts as well and has no use for numpy.
        import numpy as np

        # Over its versions numpy keeps the raw bits of a seed, but not what `Generator.permutation` does.
        keys = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(self.n)
        order: list[int] = np.argsort(keys, kind="stable").tolist()
        return order
