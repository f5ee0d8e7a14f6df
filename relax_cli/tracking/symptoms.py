"""What the metrics of a run say about its health: one table of pure functions over the last steps.

Each looks at the newest records and returns what it sees, or None. The page docs/troubleshooting.md has the same table.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Record = Mapping[str, Any]
PATIENCE = 3
"""Steps in a row after which most symptoms are worth a warning."""
FLAT_FOR = 50
NEGATIVE_FOR = 20
SPIKE = 10.0
MEMORY = max(FLAT_FOR, NEGATIVE_FOR)


@dataclass
class History:
    """What symptoms look at: the last steps, the first ones, the best one."""

    recent: deque[Record] = field(default_factory=lambda: deque(maxlen=MEMORY))
    first: list[Record] = field(default_factory=list)
    """Of the first `PATIENCE` steps in which the actor learned."""
    best: Record | None = None
    """The step of the highest mean reward before the newest."""

    def add(self, record: Record) -> None:
        """The next step's metrics, with its number as `step`."""
        before = self.recent[-1]["reward/mean"] if self.recent else math.nan
        if self.best is None or before > self.best["reward/mean"]:
            self.best = self.recent[-1] if math.isfinite(before) else self.best
        self.recent.append(record)
        if len(self.first) < PATIENCE and "entropy" in record:
            self.first.append(record)

    def last(self, count: int) -> list[Record]:
        """The newest steps; empty when there are fewer."""
        return list(self.recent)[-count:] if len(self.recent) >= count else []

    def values(self, name: str, count: int = PATIENCE) -> list[float]:
        """A metric in the newest steps; empty unless each of them has it as a finite number."""
        found = [record.get(name) for record in self.last(count)]
        numbers = [value for value in found if value is not None and math.isfinite(value)]
        return numbers if len(numbers) == len(found) else []

    @property
    def is_alive(self) -> bool:
        """Whether the newest step is one to learn from: its rewards differ, or are the highest so far."""
        return not self.recent or not _is_dead(self.recent[-1], self.best)


def _is_dead(record: Record, best: Record | None) -> bool:
    fell = best is not None and record["reward/mean"] < best["reward/mean"]
    return (_is_equal(record) and fell) or not math.isfinite(record["reward/mean"])


def _is_equal(record: Record) -> bool:
    low = record.get("reward/min")
    return low is not None and bool(low == record["reward/max"])


def _policy_died(history: History) -> str | None:
    last, best = history.last(PATIENCE), history.best
    if not last or not all(_is_dead(record, best) for record in last):
        return None
    before = "" if best is None else f"; step {best['step']} had a mean of {best['reward/mean']:g}"
    return f"every sample of the last {PATIENCE} steps got the reward {last[-1]['reward/mean']:g}{before}"


def _rewards_equal(history: History) -> str | None:
    last = history.last(PATIENCE)
    if not last or not all(_is_equal(record) for record in last) or _policy_died(history):
        return None
    return f"all rewards within each of the last {PATIENCE} steps are equal ({last[-1]['reward/mean']:g})"


def _reward_flat(history: History) -> str | None:
    means = history.values("reward/mean", FLAT_FOR)
    if not means or not history.values("pg_loss", FLAT_FOR):
        return None
    half = FLAT_FOR // 2
    before, after = statistics.mean(means[:half]), statistics.mean(means[half:])
    if after > before:
        return None
    return f"the mean reward has not risen for {FLAT_FOR} steps: {before:.3g} in the first {half}, then {after:.3g}"


def _lasting(
    metric: str, is_bad: Callable[[float], bool], text: str, steps: int = PATIENCE
) -> Callable[[History], str | None]:
    """Sees a metric that is bad in each of the last steps; the text may show its newest value."""

    def sees(history: History) -> str | None:
        values = history.values(metric, steps)
        return text.format(values[-1]) if values and all(map(is_bad, values)) else None

    return sees


def _above(metric: str, limit: float, text: str) -> Callable[[History], str | None]:
    seen = f"{metric} is {{:.3g}}, above {limit:g} for {PATIENCE} steps: {text}"
    return _lasting(metric, lambda value: value > limit, seen)


def _entropy_collapse(history: History) -> str | None:
    first = [record["entropy"] for record in history.first]
    values = history.values("entropy")
    if len(first) < PATIENCE or not values or history.best is None:
        return None
    rewards = history.values("reward/mean")
    start = statistics.mean(first)
    if max(values) >= 0.05 * start or max(rewards, default=math.inf) >= history.best["reward/mean"]:
        return None
    return f"entropy fell from {start:.3g} to {values[-1]:.3g}, and the reward is below that of earlier steps"


def _grad_spike(history: History) -> str | None:
    for name in ("actor/grad_norm", "critic/grad_norm"):
        last = history.values(name, 1)
        usual = [r[name] for r in list(history.recent)[:-1] if r.get(name) is not None and math.isfinite(r[name])]
        if last and len(usual) >= 10 and last[0] > SPIKE * (middle := statistics.median(usual)) > 0:
            return f"{name} is {last[0]:.3g}, usually {middle:.3g}"
    return None


def _steps_skipped(history: History) -> str | None:
    for role in ("actor", "critic"):
        skipped = history.values(f"{role}/skipped_steps")
        taken = history.values(f"{role}/optimizer_steps")
        if skipped and min(skipped) > 0 and not any(taken or [1.0]):
            return (
                f"all optimizer steps of the {role} were skipped in the last {PATIENCE} steps, because of gradients "
                "that are NaN or infinite: nothing is learned"
            )
    return None


@dataclass(frozen=True)
class Symptom:
    """Something that metrics show and a person should know of."""

    id: str
    sees: Callable[[History], str | None]
    look_at: str
    """What to look at, or to change."""
    gone_after: int = 1
    """Steps without it after which it counts as gone."""


SYMPTOMS = (
    Symptom(
        "policy-died", _policy_died,
        "the samples of these steps; if the policy has died, start again from an earlier pair with a lower --lr",
    ),
    Symptom(
        "rewards-equal", _rewards_equal,
        "the samples: does the reward find the answer in the response (--rm-type, --label-key), and are the prompts "
        "neither too hard nor too easy",
    ),
    Symptom(
        "reward-flat", _reward_flat,
        "the samples, reward/std (without a spread nothing is learned), pg_clip_frac (0: a higher --lr)",
        gone_after=FLAT_FOR // 2,
    ),
    Symptom(
        "all-truncated",
        _lasting(
            "truncated_frac", lambda value: value >= 1,
            f"every response of the last {PATIENCE} steps was cut at the length limit",
        ),
        "--rollout-max-response-len, the end-of-sequence token of the model, --apply-chat-template, --rollout-stop",
    ),
    Symptom(
        "clip-fraction", _above("pg_clip_frac", 0.3, "the policy moves further than its samples can tell"),
        "a lower --lr, fewer optimizer steps per rollout (--num-steps-per-rollout)",
    ),
    Symptom(
        "kl-large", _above("ppo_kl", 0.1, "the policy moves far within one step"),
        "a lower --lr, fewer optimizer steps per rollout (--num-steps-per-rollout)",
    ),
    Symptom(
        "value-clip", _above("value_clip_frac", 0.5, "clipping limits what the critic learns"),
        "a larger --value-clip when rewards are much larger than 1, a lower --critic-lr",
    ),
    Symptom(
        "value-head-still",
        _lasting(
            "critic/value_head_moved", lambda value: value == 0,
            f"the critic's value head has not moved in {PATIENCE} steps",
        ),
        "critic/lr, critic/grad_norm and critic/skipped_steps (--critic-lr, --critic-lr-warmup-iters)",
    ),
    Symptom(
        "explained-variance",
        _lasting(
            "explained_variance", lambda value: value < 0,
            f"explained_variance has been below 0 for {NEGATIVE_FOR} steps ({{:.3g}}): worse than no values",
            NEGATIVE_FOR,
        ),
        "more --num-critic-only-steps, another --critic-lr, value_clip_frac",
    ),
    Symptom(
        "logprob-diff",
        _above("train_rollout_logprob_diff/mean", 0.1, "trainer and rollout engine disagree about the same tokens"),
        "precision and version of the rollout engine, the model folder of external servers; --use-tis weighs the gap",
    ),
    Symptom(
        "no-signal", _above("groups/no_signal_frac", 0.9, "these groups have equal rewards and teach nothing"),
        "easier or harder prompts, a larger --n-samples-per-prompt, a higher --rollout-temperature",
    ),
    Symptom(
        "dynamic-sampling-bound",
        _above("sampling/filled_frac", 0.0, "groups of equal rewards complete the batch"),
        "easier or harder prompts, a larger --over-sampling-batch-size, --dynamic-sampling-max-rounds",
    ),
    Symptom(
        "entropy-collapse", _entropy_collapse,
        "whether responses have become all the same; --entropy-coef, a larger --eps-clip-high, a lower --lr",
    ),
    Symptom(
        "grad-norm-spike", _grad_spike,
        "the samples of this step (length, rewards), --clip-grad; many spikes ask for a lower --lr",
        gone_after=20,
    ),
    Symptom("steps-skipped", _steps_skipped, "a lower --lr or --clip-grad"),
)  # fmt: skip


class HealthWatch:
    """Names a symptom once, and again only after it went away."""

    def __init__(self) -> None:
        self.history = History()
        self._seen_at: dict[str, int] = {}

    def remember(self, records: Iterable[Record]) -> None:
        """The steps of a run before it was resumed: what was named then is not named again."""
        for record in records:
            if record.get("reward/mean") is not None:
                self.observe(record["step"], record)

    def observe(self, step: int, metrics: Record) -> list[dict[str, str]]:
        """The symptoms that are new with this step, as `metrics.jsonl` has them."""
        self.history.add({**metrics, "step": step})
        new = []
        for symptom in SYMPTOMS:
            if (seen := symptom.sees(self.history)) is None:
                continue
            if step - self._seen_at.get(symptom.id, -MEMORY) > symptom.gone_after:
                new.append({"id": symptom.id, "seen": seen, "look_at": symptom.look_at})
            self._seen_at[symptom.id] = step
        return new
