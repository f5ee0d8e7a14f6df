"""Whether a label is one that the chosen reward can compare with, found out before a launch."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from relax_cli.config.schema import RewardSection
from relax_cli.data.prompts import Prompt
from relax_cli.data.rewards.math_answers import is_word, parse_label
from relax_cli.errors import Problem, problem_kind

MOST_PARSED = 200
"""Labels given to math-verify, which needs milliseconds for each; plain numbers are known to be mathematics."""

NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)?")
REASONING_GYM_KEYS = ("source_dataset", "question", "answer")

LABEL_UNUSABLE = problem_kind(
    "label-unusable",
    "Data",
    "The chosen reward cannot compare with this label: it is blank (`exact`), or no mathematics (`math`).",
    option="--label-key",
)
LABEL_METADATA = problem_kind(
    "label-metadata",
    "Data",
    "The reward `reasoning_gym` needs the metadata that reasoning-gym writes.",
    option="--rm-type",
)

LabelCheck = Callable[[Prompt], Problem | None]


def label_check(reward: RewardSection) -> LabelCheck | None:
    """The check for the reward that is chosen; None where any label will do."""
    if reward.custom_rm_path is not None:
        return None
    checks: dict[str, LabelCheck] = {"exact": _exact, "math": _MathCheck(), "reasoning_gym": _reasoning_gym}
    return checks.get(reward.rm_type or "")


def _exact(prompt: Prompt) -> Problem | None:
    if prompt.label is None or prompt.label.strip():
        return None
    return _bad_label(prompt, "the label is empty, so an empty response would be right", "a label that is not blank")


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


class _MathCheck:
    """math-verify has to find mathematics in the label."""

    def __init__(self) -> None:
        self._parsed = 0

    def __call__(self, prompt: Prompt) -> Problem | None:
        label = prompt.label
        if label is None or NUMBER.fullmatch(label.strip()) or self._parsed >= MOST_PARSED:
            return None
        self._parsed += 1
        # math-verify keeps its deadline with a signal, which only the main thread may set.
        deadline = 5 if threading.current_thread() is threading.main_thread() else None
        if is_word(label) or parse_label(label, deadline):
            return None
        return _bad_label(prompt, "math-verify finds no mathematics in the label", "a number or LaTeX")


def _bad_label(prompt: Prompt, message: str, expected: str) -> Problem:
    return LABEL_UNUSABLE(
        message,
        where=prompt.source,
        got=repr(prompt.label)[:80],
        expected=expected,
        fix=f"correct or remove {prompt.source}, or choose another --rm-type",
    )
