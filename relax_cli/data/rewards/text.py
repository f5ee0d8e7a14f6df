"""Rewards that read text only, and the penalty of overlong responses. `regex` and `json_schema` may take for ever on an
unlucky text.

A label that is a list accepts each of its items.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from typing import Any

from relax_cli.data.rewards.types import RewardInput, Score

ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NOT_WORDS = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_LETTER = r"[*_`$( \[#\"']*\b([A-Z]|[b-z]|a(?=\W*$))\b"
_ASKED = r"(?i:answer|(?:correct|right|best) (?:option|choice))"
_CHOICES = (
    re.compile(r"\\boxed\s*\{\s*(?:\\\w+\s*\{\s*)?\(?([A-Za-z])(?=\s*[).:}])"),
    re.compile(rf"\b{_ASKED}(?:\s+is)?(?:\s+(?:option|choice))?\s*[:=]?{_LETTER}", re.MULTILINE),
    re.compile(rf"\A{_LETTER}[*_`$)\]]*(?:[.:)]|\Z)"),
    re.compile(rf"^{_LETTER}[*_`$)\].\"']*\Z", re.MULTILINE),
)
"""Where a choice stands, the surest place first; of each the last match counts."""
LETTER = re.compile(r"\s*\(?([A-Za-z])[).]?\s*")
"""A label of `multiple_choice`."""


def exact(sample: RewardInput) -> float:
    """1.0 where the response equals an answer of the label, white space at both ends aside, else 0.0.
    Raises RunError: the sample has no label."""
    return float(sample.response.strip() in {answer.strip() for answer in sample.answers("exact")})


def f1(sample: RewardInput) -> Score:
    """F1 of the words of response and answer, the best over all answers (Rajpurkar et al. 2016, SQuAD).

    With c words in common, of r in the response and a in the answer: F1 = 2c / (r + a). Words are compared in lower
    case, without punctuation and the articles a, an, the. The part `exact` is 1 where all words are equal.
    Raises RunError: the sample has no label.
    """
    given = words_of(sample.response)
    answers = [words_of(answer) for answer in sample.answers("f1")]
    return {"reward": max(_f1(given, answer) for answer in answers), "exact": float(given in answers)}


def _f1(given: list[str], answer: list[str]) -> float:
    common = sum((Counter(given) & Counter(answer)).values())
    return 2 * common / (len(given) + len(answer)) if given and answer else float(given == answer)


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_NOT_WORDS)).split()


def multiple_choice(sample: RewardInput) -> Score:
    """1.0 where the letter that the response chooses is the label's, else 0.0; `answered` is 1 where a letter is found.
    Raises RunError: the sample has no label."""
    right = {answer.strip(" ().").upper() for answer in sample.answers("multiple_choice")}
    chosen = chosen_letter(sample.response)
    return {"reward": float(chosen in right), "answered": float(chosen is not None)}


def chosen_letter(response: str) -> str | None:
    """The letter that a response chooses: in the last box, after `answer`, at its start, or as its last line; all of it
    in the last `<answer>…</answer>`, where there is one."""
    text = (ANSWER_TAG.findall(response) or [response])[-1].strip()
    if (whole := LETTER.fullmatch(text)) is not None:
        return whole[1].upper()
    found = next((letters for pattern in _CHOICES if (letters := pattern.findall(text))), None)
    return None if found is None else str(found[-1]).upper()


def tagged(sample: RewardInput) -> float:
    """`format`: 1.0 for `<think>…</think><answer>…</answer>` and nothing else (DeepSeek-R1), else 0.0."""
    tag = r"</?(?:think|answer)>"
    tags, parts = re.findall(tag, sample.response), [part.strip() for part in re.split(tag, sample.response)]
    inside = tags == ["<think>", "</think>", "<answer>", "</answer>"]
    return float(inside and not any(parts[0::2]) and all(parts[1::2]))


def overlong_penalty(length: int, *, longest: int, buffer: int) -> float:
    """What a response of `length` tokens loses, from 0 to 1 (Yu et al. 2025, arXiv:2503.14476, eq. 13): 0 up to L − B,
    then (length − (L − B)) / B, and 1 at L, with L the longest response and B the buffer."""
    return min(1.0, max(0.0, (length - (longest - buffer)) / buffer))


_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def regex(sample: RewardInput) -> float:
    """1.0 where the label, a regular expression of Python, is found in the response, else 0.0.
    Raises RunError: the sample has no label."""
    return float(any(re.search(pattern, sample.response) for pattern in sample.answers("regex")))


def json_schema(sample: RewardInput) -> dict[str, float]:
    """1.0 where the response, or its last fenced block, is JSON by the schema that is the label, else 0.0.
    The part `json` is 1 where it is JSON at all."""
    from jsonschema.validators import validator_for
    from referencing import Registry

    schema = schema_of(sample.label)
    fenced = _FENCE.findall(sample.response)
    try:
        value = json.loads(fenced[-1] if fenced else sample.response)
    except (ValueError, RecursionError):
        return {"reward": 0.0, "json": 0.0}
    # A registry of its own: a schema that names another is not fetched from the network.
    validator = validator_for(schema)(schema, registry=Registry())
    return {"reward": float(validator.is_valid(value)), "json": 1.0}


def schema_of(label: Any) -> Any:
    """The schema of a label: an object, or its text. Raises ValueError: it is not a JSON object."""
    schema = json.loads(label) if isinstance(label, str) else label
    if not isinstance(schema, dict):
        raise ValueError("is not a JSON object")
    return schema


def pattern_fault(pattern: str) -> str:
    """Why a label is not a regular expression; empty where it is one."""
    if not pattern:
        return "the label is empty, so every response would be right"
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"the label is not a regular expression: {error}"
    return ""


def schema_fault(label: Any) -> str:
    """Why a label is not a JSON schema; empty where it is one."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    try:
        schema = schema_of(label)
        validator_for(schema).check_schema(schema)
    except (SchemaError, ValueError) as error:
        return f"the label is not a JSON schema: {getattr(error, 'message', error)}"
    return ""
