"""The answer in a response, in a form that equal answers share: what a majority of responses is counted of."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction

from relax_cli.config.data_section import shares_of
from relax_cli.data.rewards.math import final_answer
from relax_cli.data.rewards.text import chosen_letter, words_of
from relax_cli.data.rewards.types import RewardResult
from relax_cli.data.rows import Label

RIGHT = "right"
NUMBER = re.compile(r"-?\d+(?:[.,/]\d+)*")
FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")


def majority_sizes(samples: int) -> list[int]:
    """Of how many responses majorities are counted: 4, 8, 16 … of n, and n. That of 2 would be pass@1."""
    smaller = [1 << power for power in range(2, samples.bit_length()) if 1 << power < samples]
    return [*smaller, samples] if samples > 1 else []


def compared_reward(reward: str | None) -> str | None:
    """The one of a sum of rewards by which answers can be compared; None where there is none, or several."""
    names = [name for name, _ in shares_of(reward or "") if name in _ANSWERS]
    return names[0] if len(names) == 1 else None


def comparable_answer(reward: str | None, response: str, label: Label, result: RewardResult) -> str | None:
    """The answer of a judged response, the same for all that the reward finds equal to the same label, however they are
    spelled; None where the reward compares none."""
    name = compared_reward(reward)
    if name is None:
        return None
    if result.parts.get(name, result.reward) == 1.0 and not isinstance(label, list):
        return RIGHT
    return f"{name}:{_ANSWERS[name](response)}"


def _math(response: str) -> str:
    """The value of the number in the last box, or of the last number; else the text of the answer."""
    answer = FRACTION.sub(r"\1/\2", final_answer(response))
    numbers = NUMBER.findall(answer)
    text = "".join(answer.split()).strip("$")
    if numbers and "\\boxed" not in response:
        text = numbers[-1]
    with suppress(ValueError, ZeroDivisionError):
        return str(Fraction(text.replace(",", "")))
    return text


_ANSWERS: dict[str, Callable[[str], str]] = {
    "exact": str.strip,
    "f1": lambda response: " ".join(words_of(response)),
    "math": _math,
    "multiple_choice": lambda response: chosen_letter(response) or "",
}
