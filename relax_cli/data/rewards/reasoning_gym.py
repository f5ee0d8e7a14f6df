"""`reasoning_gym`: the scorer of the task that made the prompt.

The answer is what stands in the last `<answer>` tag; else, where the expected answer is a number, the last
number of the response; else the whole response. Parts: `score` (the task's own, partial credit included) and
`correct` (1 for a full score), which is the reward unless `--reward-key score`.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from reasoning_gym import get_score_answer_fn

from relax_cli.data.rewards.text import ANSWER_TAG
from relax_cli.data.rewards.types import REWARD, RewardInput
from relax_cli.errors import RunError, problem_kind

ENTRY = problem_kind(
    "reasoning-gym-entry",
    "Reward",
    "A row is not from reasoning-gym, or its task does not accept its own answer.",
    option="--rm-type",
)

# A minus right after a digit or a bracket subtracts (`7-5`), it does not negate.
NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
_scorer = functools.cache(get_score_answer_fn)


def judge(sample: RewardInput) -> dict[str, float]:
    """1.0 where the task gives a response to a prompt of `--prompt-data reasoning-gym:TASK` its full score.
    Raises RunError: a prompt is not from reasoning-gym, or its task does not even accept its own answer."""
    metadata = sample.metadata
    if missing := {"source_dataset", "question", "answer"} - metadata.keys():
        lacking = ", ".join(sorted(missing))
        raise _error(sample, f"the prompt is not from reasoning-gym: its metadata lacks {lacking}")
    entry = {"question": metadata["question"], "answer": metadata["answer"], "metadata": metadata}
    expected = None if entry["answer"] is None else str(entry["answer"])
    score = _score(sample, extract_answer(sample.response, expected), entry)
    correct = float(score >= 1.0)
    return {REWARD: correct, "score": score, "correct": correct}


def _score(sample: RewardInput, answer: str, entry: dict[str, Any]) -> float:
    name = sample.metadata["source_dataset"]
    try:
        scorer = _scorer(name)
    except ValueError as error:
        raise _error(sample, f"reasoning-gym has no task {name!r}") from error
    parse_errors = (ValueError, TypeError, LookupError, AttributeError, SyntaxError, ArithmeticError)
    try:
        return float(scorer(answer, entry))
    # Some tasks raise on answers they cannot parse: a wrong answer, unless the entry itself is broken.
    except parse_errors:
        try:
            scorer(entry["answer"], entry)
        except parse_errors as error:
            raise _error(sample, f"the task refuses its own answer: {error}") from error
        return 0.0


def extract_answer(response: str, expected: str | None) -> str:
    """The part of a response that is compared with the expected answer."""
    if tagged := ANSWER_TAG.findall(response):
        return str(tagged[-1]).strip()
    if (
        expected is not None
        and NUMBER.fullmatch(expected.strip())
        and (numbers := NUMBER.findall(response.replace("−", "-")))
    ):
        return str(numbers[-1]).replace(",", "")
    return response.strip()


def _error(sample: RewardInput, message: str) -> RunError:
    got, expected = str(sample.metadata)[:200], "metadata of a reasoning-gym entry"
    fix = "--prompt-data reasoning-gym:TASK, or another --rm-type"
    return RunError(ENTRY(message, where=sample.describe(), got=got, expected=expected, fix=fix))
