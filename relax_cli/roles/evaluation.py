"""What an evaluation of a held-out set measures. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relax_cli.roles.spread import Spread


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


def eval_metrics(name: str, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The metrics `eval/NAME/…` of a set, which do not depend on how its prompts were spread over workers."""
    parts = sorted({part for outcome in outcomes for part in outcome.parts})
    found: dict[str, float] = {
        **Spread.of(o.reward for o in outcomes).metrics("reward"),
        **{f"reward/part/{p}": Spread.of(o.parts[p] for o in outcomes if p in o.parts).mean for p in parts},
        **Spread.of(o.response_len for o in outcomes).metrics("response_len"),
        "truncated_frac": Spread.of(o.truncated for o in outcomes).mean,
        "samples": len(outcomes),
    }
    return {f"eval/{name}/{metric}": value for metric, value in found.items()}
