"""Whether a label is one that the chosen reward can compare with, found out before a launch."""

from __future__ import annotations

import re
from collections.abc import Callable

from relax_cli.config.schema import RewardSection
from relax_cli.data.prompts import Prompt
from relax_cli.data.rewards.math_answers import is_usable, is_word
from relax_cli.data.rewards.types import answers_of
from relax_cli.data.values import Unusable, shown
from relax_cli.errors import Problem, problem_kind

NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)?")
REASONING_GYM_KEYS = ("source_dataset", "question", "answer")

LABEL_UNUSABLE = problem_kind(
    "label-unusable",
    "Data",
    "The chosen reward cannot compare with this label: it is blank (`exact`), or not mathematics (`math`).",
    option="--label-key",
)
LABEL_METADATA = problem_kind(
    "label-metadata",
    "Data",
    "The reward `reasoning_gym` needs the metadata that reasoning-gym writes.",
    option="--rm-type",
)

LABEL_WORDS = problem_kind(
    "label-words",
    "Data",
    "A warning: labels for the reward `math` are words, which are compared as text with the last answer of a response.",
    option="--rm-type",
    severity="warning",
)

LabelCheck = Callable[[Prompt], Problem | None]


def label_check(reward: RewardSection) -> LabelCheck | None:
    """The check for the reward that is chosen; None where any label will do."""
    if reward.custom_rm_path is not None:
        return None
    return {"exact": _exact, "math": _math, "reasoning_gym": _reasoning_gym}.get(reward.rm_type or "")


def _exact(prompt: Prompt) -> Problem | None:
    answers = _answers(prompt)
    if isinstance(answers, Problem) or all(answer.strip() for answer in answers):
        return answers if isinstance(answers, Problem) else None
    return _bad_label(prompt, "the label is empty, so an empty response would be right", "a label that is not blank")


def _answers(prompt: Prompt) -> list[str] | Problem:
    """What is right by a label, which may be a list."""
    try:
        answers = answers_of(prompt.label)
    except Unusable as error:
        return _bad_label(prompt, f"the label {error}", "a text, a number or a list of them")
    if prompt.label is not None and not answers:
        return _bad_label(prompt, "the label is a list without an answer", "at least one answer")
    return answers


def _reasoning_gym(prompt: Prompt) -> Problem | None:
    missing = [key for key in REASONING_GYM_KEYS if key not in prompt.metadata]
    if not missing:
        return None
    return LABEL_METADATA(
        f"the row is not from reasoning-gym: its metadata lacks {', '.join(missing)}",
        where=prompt.source,
        got=", ".join(prompt.metadata) or "no metadata",
        expected=", ".join(REASONING_GYM_KEYS),
        fix="--prompt-data reasoning-gym:TASK, or another --rm-type",
    )


def _math(prompt: Prompt) -> Problem | None:
    answers = _answers(prompt)
    if isinstance(answers, Problem):
        return answers
    label = next((answer for answer in answers if not NUMBER.fullmatch(answer)), "1")
    if not is_usable(label):
        return _bad_label(prompt, "there is no mathematics in the label", "a number, LaTeX or a word")
    # A letter may be a variable.
    if len(label) > 1 and is_word(label):
        return LABEL_WORDS(
            "a label is a word, which math compares as text with the last answer",
            where=prompt.source,
            got=shown(label),
            expected="a number or LaTeX",
            fix="--rm-type exact, where the whole response is the answer, or a reward of your own",
        )
    return None


def _bad_label(prompt: Prompt, message: str, expected: str) -> Problem:
    return LABEL_UNUSABLE(
        message,
        where=prompt.source,
        got=repr(prompt.label)[:80],
        expected=expected,
        fix="correct or remove the row, or choose another --rm-type",
    )
