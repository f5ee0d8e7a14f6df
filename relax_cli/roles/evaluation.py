"""What an evaluation of a held-out set measures. Importing this imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb, fsum, sqrt

from relax_cli.roles.spread import Spread

NORMAL_95 = 1.959964
"""Half the width of a 95 % interval in standard errors."""


@dataclass(frozen=True)
class Outcome:
    """One judged response to a prompt of a held-out set."""

    prompt: int
    """Place of its prompt in the set."""
    reward: float
    parts: dict[str, float]
    """Of the reward."""
    response_len: int
    truncated: bool
    answer: str | None = None
    """What a majority is counted of; None where answers cannot be compared."""


def eval_metrics(name: str, outcomes: Sequence[Outcome], pass_reward: float) -> dict[str, float]:
    """The metrics `eval/NAME/…` of a set, which do not depend on how its prompts were spread over workers."""
    parts = sorted({part for outcome in outcomes for part in outcome.parts})
    by_prompt: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        by_prompt.setdefault(outcome.prompt, []).append(outcome)
    groups = list(by_prompt.values())
    found: dict[str, float] = {
        **Spread.of(o.reward for o in outcomes).metrics("reward"),
        **dict(_confidence(groups)),
        **{f"reward/part/{p}": Spread.of(o.parts[p] for o in outcomes if p in o.parts).mean for p in parts},
        **dict(_passed(groups, pass_reward)),
        **Spread.of(o.response_len for o in outcomes).metrics("response_len"),
        "truncated_frac": Spread.of(o.truncated for o in outcomes).mean,
        "prompts": len(groups),
        "samples": len(outcomes),
    }
    return {f"eval/{name}/{metric}": value for metric, value in found.items()}


def _confidence(groups: Sequence[Sequence[Outcome]]) -> Iterator[tuple[str, float]]:
    """Half the 95 % interval of the mean reward: of means of prompts, since samples of one prompt are alike."""
    if len(groups) > 1:
        means = Spread.of(fsum(o.reward for o in group) / len(group) for group in groups)
        yield "reward/ci95", NORMAL_95 * means.std / sqrt(len(groups))


def _passed(groups: Sequence[Sequence[Outcome]], pass_reward: float) -> Iterator[tuple[str, float]]:
    counts = [(len(group), sum(o.reward >= pass_reward for o in group)) for group in groups]
    fewest = min((samples for samples, _ in counts), default=0)
    k = 1
    while k <= fewest:
        yield f"pass@{k}", Spread.of(pass_at(k, samples, passed) for samples, passed in counts).mean
        k *= 2
    if fewest > 1 and all(o.answer is not None for group in groups for o in group):
        yield f"majority@{fewest}", Spread.of(_majority(group).reward >= pass_reward for group in groups).mean


def pass_at(k: int, samples: int, passed: int) -> float:
    """Chance that one of k responses passes: 1 - C(n-c, k) / C(n, k), unbiased (Chen et al. 2021, equation 1)."""
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def _majority(group: Sequence[Outcome]) -> Outcome:
    """The first response with the answer that most have; of answers equally often given, that of the earlier one."""
    ((answer, _),) = Counter(outcome.answer for outcome in group).most_common(1)
    return next(outcome for outcome in group if outcome.answer == answer)
