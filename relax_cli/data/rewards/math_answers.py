"""Whether a response's last answer has the value of a label, in the spellings that people use.

math-verify (sympy) reads and compares; nothing here has a deadline.
"""

from __future__ import annotations

import re
from contextlib import suppress
from decimal import Decimal
from math import isclose
from typing import Any, Literal

TOLERANCE = 1.5e-6
"""Relative; a decimal is compared with it, whole numbers and fractions exactly."""

_PERCENT = re.compile(r"\\?%|(?:\\text\{\s*|\\mathrm\{\s*)?\bper ?cent\b\s*\}?", re.IGNORECASE)
_SCIENTIFIC = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[eE][+-]?\d{1,3}(?!\w)")
_WORDS = re.compile(r"[^\W\d_][^\W\d_ '.-]*(?:[ '.-]+[^\W\d_]+)*")
_DRESS = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_ANSWER = re.compile(r"answer(?:\s+is)?\s*:?\s*(.*)", re.IGNORECASE)


def compare(label: str, response: str) -> Literal["right", "wrong", "bad-label"]:
    """Whether the response's last answer has the value of the label. Without a deadline."""
    if not is_usable(label):
        return "bad-label"
    gold, words = _parse(as_math(_without_percent(_plain(label)))), _words(label)
    if words is not None and _words(final_answer(response)) == words:
        return "right"
    if gold and _equal(gold, _parse(_without_percent(_plain(response)))):
        return "right"
    # 28% is 28 to most who write it, and 0.28 besides: the literal meaning counts where one side has no sign.
    if gold and bool(_PERCENT.search(label)) != bool(_PERCENT.search(response)):
        literal = _parse(as_math(_PERCENT.sub("%", _plain(label))))
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


def _equal(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    # math-verify rounds to six places: 1e-7 and 2e-7 would be equal, 1234567.891 and 1234567.89 not.
    golds, answers = _numbers(gold), _numbers(answer)
    if golds and answers and _has_decimal([*gold, *answer]) and not _is_whole(gold[0]):
        return any(isclose(one, other, rel_tol=TOLERANCE) for one in golds for other in answers)
    return bool(verify(gold, answer, timeout_seconds=None))


def _numbers(values: list[Any]) -> list[float]:
    """The real numbers among what was parsed."""
    from sympy import Expr

    numbers = []
    for value in values:
        if isinstance(value, Expr) and value.is_number and value.is_real:
            with suppress(TypeError, OverflowError):
                numbers.append(float(value))
    return numbers


def _has_decimal(values: list[Any]) -> bool:
    from sympy import Expr, Float

    return any(isinstance(value, Expr) and value.has(Float) for value in values)


def _is_whole(value: Any) -> bool:
    from sympy import Integer

    return isinstance(value, Integer) and value != 0


def _plain(text: str) -> str:
    """Without escaped dollars, and with numbers such as 1.5e-7 written out."""
    return _SCIENTIFIC.sub(lambda match: format(Decimal(match[0]), "f"), text.replace("\\$", ""))


def _without_percent(text: str) -> str:
    return _PERCENT.sub("", text)


def _words(text: str) -> str | None:
    """The letters and words of a text in one case, without their LaTeX and punctuation; None for anything else."""
    bare = _DRESS.sub(r"\1", text).strip(" \t\n$*_`.,:;!()[]\"'\\")
    return bare.casefold() if _WORDS.fullmatch(bare) else None


def final_answer(response: str) -> str:
    if boxed := _BOXED.findall(response):
        return str(boxed[-1])
    if named := _ANSWER.findall(response):
        return str(named[-1])
    return response
