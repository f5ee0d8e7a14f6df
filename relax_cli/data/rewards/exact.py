"""`exact`: 1 if the response is the label, or one of its list, white space at both ends aside."""

from __future__ import annotations

from collections.abc import Sequence

from relax_cli.data.rewards.types import RewardInput


def exact(samples: Sequence[RewardInput]) -> list[float]:
    """1.0 where the stripped response equals a stripped answer of the label, else 0.0.

    Raises:
        RunError: a sample has no label.
    """
    return [float(s.response.strip() in {answer.strip() for answer in s.answers("exact")}) for s in samples]
