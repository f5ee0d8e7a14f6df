"""`math`: whether a response's last answer has the value of a label, in the spellings that people use.

math-verify (sympy) reads and compares; nothing here has a deadline.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from typing import Any, Literal

from relax_cli.data.rewards.text import ANSWER_TAG
from relax_cli.data.rewards.types import RewardInput
from relax_cli.errors import RunError, problem_kind

MATH_LABEL = problem_kind("math-label", "Reward", "During the run, math-verify found no mathematics in a label.")
TOLERANCE = 1.5e-6
"""Relative; a decimal is compared with it, whole numbers and fractions exactly."""

_PERCENT = re.compile(r"\\?%|(?:\\text\{\s*|\\mathrm\{\s*)?\bper ?cent\b\s*\}?", re.IGNORECASE)
_WORDS = re.compile(r"[^\W\d_][^\W\d_ '.-]*(?:[ '.-]+[^\W\d_]+)*")
_DRESS = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_ANSWER_LINE = re.compile(r"[*_# ]*answer[*_ ]*:[*_ ]*(.+)", re.IGNORECASE)
_WHOLE = re.compile(r"[+-]?\d{1,300}")
_ANSWER = re.compile(r"answer(?:\s+is)?\s*:?\s*(.*)", re.IGNORECASE)
_CHOICE = re.compile(r"\s*(?:\\text\w*\s*\{\s*)?\(?([A-Z])[).:]")
_SIGNS = str.maketrans({
    "°": "", "²": "^2", "³": "^3", "∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\ne ",
    "½": " 1/2", "⅓": " 1/3", "⅔": " 2/3", "¼": " 1/4", "¾": " 3/4",
})  # fmt: skip


def _mixed(match: re.Match[str]) -> str:
    whole, over, under = map(int, match.groups())
    return f"{whole * under + over}/{under}"


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, repeated = match.groups()
    over = int(f"{whole}{fixed}{repeated}") - int(f"0{whole}{fixed}")
    return f"{over}/{10 ** len(fixed) * (10 ** len(repeated) - 1)}"


_SPELLINGS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"\\\$|\A\W*(?:\\approx(?![a-z])|≈)|(?<=\{)\\approx(?![a-z])", ""),
    (r"(?<![\w)}])(?<![\w)}] )[–—](?=[\d.\\(])", "-"),
    (r"√\s*\(?(\w+)\)?", r"\\sqrt{\1}"),
    (r"(?<![a-zA-Z])\\mathrm\{([ei])\}", r"\1"),
    # 10\,000 and 10 000
    (r"(?<![\d.,])\d{1,3}(?:(?:\\[,;: ]|[ ~\xa0\u2009\u202f])\d{3})+(?!\d)", lambda m: re.sub(r"\D", "", m[0])),
    (r"(?<![\d.,/])(\d{1,9})[ ~]+(\d{1,9})/([1-9]\d{0,8})(?![\d.])", _mixed),
    (r"(\d{0,99})\.(\d{0,99})\\(?:overline|bar)\s*\{(\d{1,99})\}", _repeating),
    (r"(?<=\d) ?(?:km/h|m/s|[ckm]m|ft)\b(?:\^(?:[23]|\{[23]\}))?", ""),
    (r"(\\boxed\s*\{[^{}]{0,200}?)[.,;\s]+\}", r"\1}"),
    (r"(?<![\w.])\d+(?:\.\d+)?[eE][+-]?\d{1,3}(?!\w)", lambda m: format(Decimal(m[0]), "f")),
)
"""What math-verify would read as something else (10\\,000 as 10 times 0), and a spelling that it reads."""


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
    if tagged := ANSWER_TAG.findall(response):
        response = tagged[-1].strip()
    final, named = final_answer(response), _answer_line(response)
    is_marked = bool(named) or "\\boxed" in response
    # sympy takes a millisecond for what most samples are: two whole numbers.
    if _WHOLE.fullmatch(label) and _WHOLE.fullmatch(final) and is_marked:
        return "right" if int(label) == int(final) else "wrong"
    words, choice = _words(label), _CHOICE.match(final)
    if words is not None and words in (_words(final), choice and choice[1].casefold()):
        return "right"
    # In a marked place a number inside of what cannot be read is not the answer: 5 of `n \\equiv 5 \\pmod 7`.
    gold = _gold(as_math(_without_percent(_plain(label))), True)
    answer = response if "\\boxed" in response else as_math(final) if named else response
    if gold and _equal(gold, _parse(_without_percent(_plain(answer)), is_marked)):
        return "right"
    # 28% is 28 to most who write it, and 0.28 besides: the literal meaning counts where one side has no sign.
    if gold and bool(_PERCENT.search(label)) != bool(_PERCENT.search(response)):
        sides = (
            _PERCENT.sub("%", _plain(text)) for text in (as_math(label), as_math(final) if is_marked else response)
        )
        return "right" if _equal(*map(_parse, sides)) else "wrong"
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
    return f"${label.replace('$', '').rstrip(' .,;')}$"


def _parse(text: str, is_latex: bool = False) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    kinds = [LatexExtractionConfig()] if is_latex else [LatexExtractionConfig(), ExprExtractionConfig()]
    parsed: list[Any] = parse(text, extraction_config=kinds, parsing_timeout=None)
    return parsed


_gold = lru_cache(256)(_parse)
"""Samples of one prompt have one label."""


def _equal(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify
    from sympy import Expr, Float, Integer, Interval, Union

    def numbers(values: list[Any]) -> list[Any]:
        found = []
        for value in values:
            # sympy finds contradictions in some numbers, and division by zero in others.
            with suppress(TypeError, ValueError, ArithmeticError):
                if isinstance(value, Expr) and value.is_number and value.is_real:
                    found.append(value.evalf())
        return [value for value in found if isinstance(value, Float | Integer)]

    def are_close(tolerance: float) -> bool:
        return any(abs(one - other) <= tolerance * max(abs(one), abs(other)) for one in golds for other in answers)

    # math-verify rounds to six places: 1e-7 and 2e-7 would be equal, 1234567.891 and 1234567.89 not.
    golds, answers = numbers(gold), numbers(answer)
    if golds and answers:
        has_decimal = any(isinstance(value, Expr) and value.has(Float) for value in [*gold, *answer])
        if has_decimal and not (isinstance(gold[0], Integer) and gold[0] != 0):
            return are_close(TOLERANCE)
        if not has_decimal and not are_close(1e-12):
            return False
    # An inequality is the interval that the label asks for; an equation would be the question.
    if gold and isinstance(gold[0], Interval | Union) and answer and not isinstance(answer[0], str):
        gold, answer = (answer, gold) if answer[0].is_Relational or answer[0].is_Boolean else (gold, answer)
    return bool(verify(gold, answer, timeout_seconds=None))


def _plain(text: str) -> str:
    """In the spellings that math-verify reads, without escaped dollars."""
    text = text.translate(_SIGNS)
    for pattern, spelled in _SPELLINGS:
        text = re.sub(pattern, spelled, text)
    return text


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
