"""`math`: 1 if the response's last answer has the value of the label (math-verify)."""

from __future__ import annotations

import logging

import math_verify  # noqa: F401 - takes seconds, which a worker spends before its first sample

from relax_cli.data.rewards.math_answers import compare
from relax_cli.data.rewards.types import RewardInput
from relax_cli.errors import RunError, problem_kind

MATH_LABEL = problem_kind("math-label", "Reward", "During the run, math-verify found no mathematics in a label.")
# math-verify warns once that it keeps no deadline itself.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def judge(sample: RewardInput) -> dict[str, float]:
    """1.0 where the last answer has the value of an answer of the label, else 0.0; without a deadline.
    Raises RunError: the sample has no label, or one that is not mathematics."""
    verdicts = [compare(answer, sample.response) for answer in sample.answers("math")]
    if "bad-label" in verdicts:
        what, expected = "math-verify finds no mathematics in the label", "a number, LaTeX or a word"
        fix, got = "correct the label, or --rm-type exact", repr(sample.label)
        raise RunError(MATH_LABEL(what, where=sample.describe(), got=got, expected=expected, fix=fix))
    correct = float("right" in verdicts)
    return {"reward": correct, "correct": correct}
