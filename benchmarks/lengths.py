"""Response lengths of the benchmarks: fixed, or ragged as real responses are."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence

SPREAD = 0.8
"""Standard deviation of the logarithm: one response in sixty reaches the limit."""


def add_lengths(parser: argparse.ArgumentParser) -> None:
    """The option `--lengths`."""
    parser.add_argument(
        "--lengths",
        choices=("fixed", "ragged"),
        default="fixed",
        help="every response at the limit; or log-normal, a quarter of a limit four times as high on average",
    )


def response_length(prompt: Sequence[int], most: int) -> int:
    """A log-normal length, `most / 4` on average, at most `most`; a function of the prompt, so equal on both sides."""
    draw = random.Random(",".join(map(str, prompt)))
    return max(1, min(most, round(draw.lognormvariate(math.log(most / 4) - SPREAD**2 / 2, SPREAD))))
