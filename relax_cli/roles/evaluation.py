"""What an evaluation of a held-out set measures. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb, fsum, sqrt

from relax_cli.data.rewards.answers import majority_sizes
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
    # Half the 95 % interval of the mean reward: of means of prompts, since samples of one prompt are alike.
    means = Spread.of(fsum(o.reward for o in group) / len(group) for group in groups)
    confidence = {"reward/ci95": NORMAL_95 * means.std / sqrt(len(groups))} if len(groups) > 1 else {}
    found: dict[str, float] = {
        **Spread.of(o.reward for o in outcomes).metrics("reward"),
        **confidence,
        **{f"reward/part/{p}": Spread.of(o.parts[p] for o in outcomes if p in o.parts).mean for p in parts},
        **dict(_passed(groups, pass_reward)),
        **Spread.of(o.response_len for o in outcomes).metrics("response_len"),
        "truncated_frac": Spread.of(o.truncated for o in outcomes).mean,
        "prompts": len(groups),
        "samples": len(outcomes),
    }
    return {f"eval/{name}/{metric}": value for metric, value in found.items()}


def _passed(groups: Sequence[Sequence[Outcome]], pass_reward: float) -> Iterator[tuple[str, float]]:
    counts = [(len(group), sum(o.reward >= pass_reward for o in group)) for group in groups]
    fewest = min((samples for samples, _ in counts), default=0)
    k = 1
    while k <= fewest:
        yield f"pass@{k}", Spread.of(pass_at(k, samples, passed) for samples, passed in counts).mean
        k *= 2
    if all(o.answer is not None for group in groups for o in group):
        votes = []
        """Of each prompt and answer: how many responses give it, and the share of them that passes."""
        for group in groups:
            passing: dict[str | None, list[bool]] = {}
            for outcome in group:
                passing.setdefault(outcome.answer, []).append(outcome.reward >= pass_reward)
            votes.append(sorted((len(each), sum(each) / len(each)) for each in passing.values()))
        for k in majority_sizes(fewest):
            yield f"majority@{k}", Spread.of(majority_at(k, each) for each in votes).mean


def pass_at(k: int, samples: int, passed: int) -> float:
    """Chance that one of k responses passes: 1 - C(n-c, k) / C(n, k), unbiased (Chen et al. 2021, equation 1)."""
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def majority_at(k: int, votes: Sequence[tuple[int, float]]) -> float:
    """Chance that the most frequent answer of k responses passes; answers that tie share it evenly.

    With n responses, c_a of them with the answer a, of which the share p_a passes, the mean over all subsets of k is

        Σ_a p_a Σ_t C(c_a, t) Σ_j N_a(t, j) / (j + 1) / C(n, k)

    where a is given t times, and N_a(t, j) counts the choices of k - t others among which j answers are given t times
    and none more often. Unbiased, since it is the mean over the choices of k.
    """
    samples = sum(count for count, _ in votes)
    won = 0.0
    for place, (count, passed) in enumerate(votes):
        if passed:
            others = [other for at, (other, _) in enumerate(votes) if at != place]
            ways = sum(comb(count, t) * _shared(k - t, t, others) for t in range(1, min(k, count) + 1))
            won += passed * float(ways / comb(samples, k))
    return won


def _shared(chosen: int, most: int, counts: Sequence[int]) -> Fraction:
    """Σ_j N(most, j) / (j + 1) for answers given `counts` times, of which `chosen` responses are drawn."""
    if most > chosen:
        return Fraction(comb(sum(counts), chosen))
    free = sum(count for count in counts if count < most)
    ways = {(0, 0): 1}
    """By responses drawn of the answers that may tie, and by ties."""
    for count in counts:
        if count >= most:
            found: dict[tuple[int, int], int] = {}
            for (drawn, ties), number in ways.items():
                for more in range(min(most, chosen - drawn) + 1):
                    key = drawn + more, ties + (more == most)
                    found[key] = found.get(key, 0) + number * comb(count, more)
            ways = found
    by_ties: dict[int, int] = {}
    for (drawn, ties), number in ways.items():
        by_ties[ties] = by_ties.get(ties, 0) + number * comb(free, chosen - drawn)
    return sum((Fraction(number, ties + 1) for ties, number in by_ties.items()), Fraction())
