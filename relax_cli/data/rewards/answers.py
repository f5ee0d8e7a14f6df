"""The answer in a response, in a form that equal answers share: what a majority of responses is counted of."""

from __future__ import annotations

import re

from relax_cli.data.rewards.math_answers import final_answer

COMPARED = frozenset({"exact", "math"})
"""Rewards whose answers are compared."""
NUMBER = re.compile(r"-?\d+(?:[.,/]\d+)*")


def comparable_answer(rm_type: str | None, response: str) -> str | None:
    """What `exact` compares; for `math` the text in the last box, or the last number; None for other rewards."""
    if rm_type == "exact":
        return response.strip()
    if rm_type == "math":
        answer = final_answer(response)
        numbers = [] if "\\boxed" in response else NUMBER.findall(answer)
        return str(numbers[-1]) if numbers else "".join(answer.split())
    return None
