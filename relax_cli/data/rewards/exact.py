"""`exact`: 1 if the response is the label, white space at both ends aside."""

from __future__ import annotations

from collections.abc import Sequence

from relax_cli.data.rewards.types import RewardInput


def exact(samples: Sequence[RewardInput]) -> list[float]:
    """1.0 where the stripped response equals the stripped label, else 0.0.

    Raises:
        RunError: a sample has no label.
    """
    return [float(sample.response.strip() == sample.required_label("exact").strip()) for sample in samples]
