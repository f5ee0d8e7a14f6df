"""Whether a label is one that the chosen reward can compare with, found out before a launch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Sequence
from math import isfinite

from relax_cli.config.data_section import RewardSection, shares_of
from relax_cli.config.names import nearest
from relax_cli.data.prompts import Prompt
from relax_cli.data.rewards import BUILTINS, REMOTE
from relax_cli.data.rewards.code import suite_of
from relax_cli.data.rewards.math import is_usable, is_word
from relax_cli.data.rewards.text import LETTER, pattern_fault, schema_fault
from relax_cli.data.rewards.types import answers_of
from relax_cli.data.rows import bad_row
from relax_cli.data.sandbox.outside import sandbox_fault
from relax_cli.data.values import Unusable, shown
from relax_cli.errors import Problem, problem_kinds

NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)?")
REASONING_GYM_KEYS = ("source_dataset", "question", "answer")

declare = problem_kinds("Data")
LABEL_UNUSABLE = declare(
    "label-unusable",
    "The reward cannot compare with this label: it is blank (`exact`, `f1`), not mathematics (`math`), not a letter"
    " (`multiple_choice`), a regular expression (`regex`), a schema (`json_schema`) or tests (`code`).",
    option="--label-key",
)
LABEL_METADATA = declare(
    "label-metadata", "The reward `reasoning_gym` needs the metadata that reasoning-gym writes.", option="--rm-type"
)

LABEL_WORDS = declare(
    "label-words",
    "A warning: labels for the reward `math` are words, which are compared as text with the last answer of a response.",
    option="--rm-type",
    severity="warning",
)

LabelCheck = Callable[[Prompt], Problem | None]


def label_check(reward: RewardSection, rewards: Collection[str]) -> LabelCheck:
    """The check of a row for the rewards that judge it; `rewards` are the names of all."""

    def check(prompt: Prompt) -> Problem | None:
        names = [name for name, _ in reward.shares if reward.custom_rm_path is None]
        if prompt.reward:
            names, problem = _of_row(prompt, reward, rewards)
            if problem is not None:
                return problem
        try:
            return next(filter(None, (CHECKS[name](prompt) for name in names if name in CHECKS)), None)
        except Unusable as error:
            return _bad_label(prompt, f"the label {error}", "a text, a number, or a list with at least one of them")

    return check


def _of_row(prompt: Prompt, reward: RewardSection, rewards: Collection[str]) -> tuple[list[str], Problem | None]:
    """The rewards that a row names, or why they cannot judge it."""
    shares = shares_of(prompt.reward or "")
    message, _ = share_faults(shares, rewards)
    names = [name for name, _ in shares]
    if not message and REMOTE in names and reward.rm_url is None:
        message = "a row is judged by remote, but --rm-url is not set"
    if message:
        return [], bad_row(prompt.source, message, shown(prompt.reward), ", ".join(sorted(rewards)))
    lacking = [name for name in names if name in BUILTINS and BUILTINS[name].needs_label]
    if lacking and prompt.label is None:
        return [], _bad_label(prompt, f"the reward {lacking[0]} of a row compares with a label", "--label-key KEY")
    return names, None


def share_faults(shares: Sequence[tuple[str, str]], rewards: Collection[str]) -> tuple[str, str]:
    """What is wrong with the words of a sum of rewards, and its fix; two empty texts where nothing is."""
    names = [name for name, _ in shares]
    if unknown := [name for name in names if name not in rewards]:
        fix = "install its plugin, or use --custom-rm-path FILE.py:function"
        if guess := nearest(unknown[0], rewards):
            corrected = [(guess if name == unknown[0] else name, weight) for name, weight in shares]
            terms = guess if len(shares) == 1 else ",".join(map("=".join, corrected))
            fix = f"--rm-type {shlex.quote(terms)}"
        return f"there is no reward {unknown[0]!r}", fix
    for name, weight in shares:
        if names.count(name) > 1:
            return f"the reward {name!r} is given twice", f"give {name} one weight"
        try:
            usable = isfinite(float(weight)) and float(weight) != 0
        except ValueError:
            usable = False
        if not usable:
            return f"the weight of the reward {name!r} is not a number other than 0", f"weigh {name}, or leave it out"
    return "", ""


def _bad_label(prompt: Prompt, message: str, expected: str) -> Problem:
    fix, got = "correct or remove the row, or choose another --rm-type", repr(prompt.label)[:80]
    return LABEL_UNUSABLE(message, fix=fix, where=prompt.source, got=got, expected=expected)


def _answers(prompt: Prompt) -> list[str]:
    """What is right by a label, which may be a list."""
    answers = answers_of(prompt.label)
    if prompt.label is not None and not answers:
        raise Unusable("is a list without an answer")
    return answers


def _each_answer(fault: Callable[[str], str], expected: str) -> LabelCheck:

    def check(prompt: Prompt) -> Problem | None:
        found = next(filter(None, map(fault, _answers(prompt))), "")
        return _bad_label(prompt, found, expected) if found else None

    return check


def _blank_fault(answer: str) -> str:
    return "" if answer.strip() else "the label is empty, so an empty response would be right"


def _letter_fault(answer: str) -> str:
    return "" if LETTER.fullmatch(answer) else "the label is not the letter of a choice"


def _reasoning_gym(prompt: Prompt) -> Problem | None:
    missing = [key for key in REASONING_GYM_KEYS if key not in prompt.metadata]
    if not missing:
        return None
    message = f"the row is not from reasoning-gym: its metadata lacks {', '.join(missing)}"
    fix, got = "--prompt-data reasoning-gym:TASK, or another --rm-type", ", ".join(prompt.metadata) or "no metadata"
    return LABEL_METADATA(message, fix=fix, where=prompt.source, got=got, expected=", ".join(REASONING_GYM_KEYS))


def _math(prompt: Prompt) -> Problem | None:
    label = next((answer for answer in _answers(prompt) if not NUMBER.fullmatch(answer)), "1")
    if not is_usable(label):
        return _bad_label(prompt, "there is no mathematics in the label", "a number, LaTeX or a word")
    # A letter may be a variable.
    if len(label) > 1 and is_word(label):
        message = "a label is a word, which math compares as text with the last answer"
        fix = "--rm-type exact, where the whole response is the answer, or a reward of your own"
        return LABEL_WORDS(message, fix=fix, where=prompt.source, got=shown(label), expected="a number or LaTeX")
    return None


def _schema(prompt: Prompt) -> Problem | None:
    fault = "" if prompt.label is None else schema_fault(prompt.label)
    return _bad_label(prompt, fault, "a JSON schema: an object, or its text") if fault else None


def _tests(prompt: Prompt) -> Problem | None:
    # A run whose --rm-type is code is refused by a rule, before rows are read.
    fault = sandbox_fault() if prompt.reward else ""
    fault = fault and f"the row is judged by code, but {fault}"
    try:
        if prompt.label is not None:
            suite_of(prompt.label)
    except ValueError as error:
        fault = str(error)
    return _bad_label(prompt, fault, "tests in a form of docs/rewards.md") if fault else None


CHECKS: dict[str, LabelCheck] = {
    "code": _tests,
    "exact": _each_answer(_blank_fault, "a label that is not blank"),
    "f1": _each_answer(_blank_fault, "a label that is not blank"),
    "json_schema": _schema,
    "math": _math,
    "multiple_choice": _each_answer(_letter_fault, "a letter, such as B or (B)"),
    "reasoning_gym": _reasoning_gym,
    "regex": _each_answer(pattern_fault, "a regular expression of Python"),
}
