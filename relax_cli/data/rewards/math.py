"""`math`: whether a response's last answer has the value of a label, in the spellings that people use.

math-verify (sympy) reads and compares; nothing here has a deadline.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from math import isclose
from typing import Any, Literal

from relax_cli.data.rewards.types import RewardInput
from relax_cli.errors import RunError, problem_kind

MATH_LABEL = problem_kind("math-label", "Reward", "During the run, math-verify found no mathematics in a label.")
TOLERANCE = 1.5e-6
"""Relative; a decimal is compared with it, whole numbers and fractions exactly."""

_PERCENT = re.compile(r"\\?%|(?:\\text\{\s*|\\mathrm\{\s*)?\bper ?cent\b\s*\}?", re.IGNORECASE)
_SCIENTIFIC = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[eE][+-]?\d{1,3}(?!\w)")
_WORDS = re.compile(r"[^\W\d_][^\W\d_ '.-]*(?:[ '.-]+[^\W\d_]+)*")
_DRESS = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_ANSWER_LINE = re.compile(r"[*_# ]*answer[*_ ]*:[*_ ]*(.+)", re.IGNORECASE)
_WHOLE = re.compile(r"[+-]?\d{1,300}")
_ANSWER = re.compile(r"answer(?:\s+is)?\s*:?\s*(.*)", re.IGNORECASE)


class MathJudge:
    """Judges one sample at a time."""

    def __init__(self) -> None:
        # Takes seconds, which no sample should pay for.
        import math_verify  # noqa: F401

        # It warns once that it keeps no deadline itself.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def __call__(self, sample: RewardInput) -> dict[str, float]:
        """1.0 where the last answer has the value of an answer of the label, else 0.0.
        Raises RunError: the sample has no label, or one that is not mathematics."""
        verdicts = [compare(answer, sample.response) for answer in sample.answers("math")]
        if "bad-label" in verdicts:
            what, expected = "math-verify finds no mathematics in the label", "a number, LaTeX or a word"
            fix, got = "correct the label, or --rm-type exact", repr(sample.label)
            raise RunError(MATH_LABEL(what, where=sample.describe(), got=got, expected=expected, fix=fix))
        correct = float("right" in verdicts)
        return {"reward": correct, "correct": correct}


def compare(label: str, response: str) -> Literal["right", "wrong", "bad-label"]:
    """Whether the response's last answer has the value of the label. Without a deadline."""
    if not is_usable(label):
        return "bad-label"
    final, named = final_answer(response), _answer_line(response)
    # sympy takes a millisecond for what most samples are: two whole numbers.
    if _WHOLE.fullmatch(label) and _WHOLE.fullmatch(final) and (named or "\\boxed" in response):
        return "right" if int(label) == int(final) else "wrong"
    gold, words = _gold(as_math(_without_percent(_plain(label)))), _words(label)
    if words is not None and _words(final) == words:
        return "right"
    if named and "\\boxed" not in response:
        response = as_math(final)
    if gold and _equal(gold, _parse(_without_percent(_plain(response)))):
        return "right"
    # 28% is 28 to most who write it, and 0.28 besides: the literal meaning counts where one side has no sign.
    if gold and bool(_PERCENT.search(label)) != bool(_PERCENT.search(response)):
        literal = _gold(as_math(_PERCENT.sub("%", _plain(label))))
        return "right" if _equal(literal, _parse(_PERCENT.sub("%", _plain(response)))) else "wrong"
    return "wrong"


def is_usable(label: str) -> bool:
    """Whether a label can be compared: math-verify takes anything as text, even signs alone, such as ???."""
    return any(character.isalnum() for character in _without_percent(_plain(label)))


def is_word(label: str) -> bool:
    """Whether a label is a letter or words, which are compared as text."""
    return _words(label) is not None


def as_math(label: str) -> str:
    """Labels are usually bare (`\\frac{1}{2}`); math-verify reads LaTeX inside an environment only."""
    if label.count("$") >= 2 or any(mark in label for mark in ("\\boxed", "\\(", "\\[")):
        return label
    return f"${label.replace('$', '')}$"


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    parsed: list[Any] = parse(text, parsing_timeout=None)
    return parsed


_gold = lru_cache(256)(_parse)
"""Samples of one prompt have one label."""


def _equal(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify
    from sympy import Expr, Float, Integer

    def numbers(values: list[Any]) -> list[float]:
        found = []
        for value in values:
            if isinstance(value, Expr) and value.is_number and value.is_real:
                with suppress(TypeError, OverflowError):
                    found.append(float(value))
        return found

    # math-verify rounds to six places: 1e-7 and 2e-7 would be equal, 1234567.891 and 1234567.89 not.
    golds, answers = numbers(gold), numbers(answer)
    has_decimal = any(isinstance(value, Expr) and value.has(Float) for value in [*gold, *answer])
    if golds and answers and has_decimal and not (isinstance(gold[0], Integer) and gold[0] != 0):
        return any(isclose(one, other, rel_tol=TOLERANCE) for one in golds for other in answers)
    return bool(verify(gold, answer, timeout_seconds=None))


def _plain(text: str) -> str:
    """Without escaped dollars, and with numbers such as 1.5e-7 written out."""
    return _SCIENTIFIC.sub(lambda match: format(Decimal(match[0]), "f"), text.replace("\\$", ""))


def _without_percent(text: str) -> str:
    return _PERCENT.sub("", text)


def _words(text: str) -> str | None:
    """The letters and words of a text in one case, without their LaTeX and punctuation; None for anything else."""
    bare = _DRESS.sub(r"\1", text).strip(" \t\n$*_`.,:;!()[]\"'\\")
    return bare.casefold() if _WORDS.fullmatch(bare) else None


def _answer_line(response: str) -> str | None:
    """The rest of a last line that begins with `Answer:`, the form of DAPO's prompts."""
    line = response.rstrip().rpartition("\n")[2]
    match = _ANSWER_LINE.fullmatch(line.strip())
    return None if match is None else match[1].strip(" *$.").removeprefix("\\(").removesuffix("\\)").strip()


def final_answer(response: str) -> str:
    """What stands in the last box, on a last line `Answer: …`, or after the last `answer`; else all of it."""
    if boxed := _BOXED.findall(response):
        return str(boxed[-1])
    if line := _answer_line(response):
        return line
    if named := _ANSWER.findall(response):
        return str(named[-1])
    return response
