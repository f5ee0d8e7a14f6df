"""Which reward judges a sample: that of its row, else `--rm-type`; one, or a weighted sum of several."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

from relax_cli.config.data_section import shares_of
from relax_cli.data.rewards.checked import REWARD_FAILED, CheckedReward
from relax_cli.data.rewards.types import RewardInput, RewardResult
from relax_cli.errors import RunError
from relax_cli.plugin.user_code import TookTooLong

log = logging.getLogger(__name__)


class ChosenReward:
    """A `RewardFunction` of several others, by name."""

    def __init__(
        self,
        default: Sequence[tuple[str, str]],
        load: Callable[[str], CheckedReward],
        on_error: Literal["stop", "zero", "drop"],
    ) -> None:
        """Args:
        default: names and weights, for samples whose row names none.
        load: a reward by its name.
        """
        self._default = default
        self._load = load
        self._on_error = on_error
        self._rewards = {name: load(name) for name, _ in default}

    def __call__(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        """See `RewardFunction`; a reward that fails on a whole batch is an error, whatever `--reward-on-error` is."""
        shares = [self._shares(sample) for sample in samples]
        found: list[dict[str, RewardResult]] = [{} for _ in samples]
        for name in dict.fromkeys(name for each in shares for name, _ in each):
            rows = [row for row, each in enumerate(shares) if name in dict(each)]
            if name not in self._rewards:
                self._rewards[name] = self._load(name)
            for row, result in zip(rows, self._judge(name, [samples[row] for row in rows]), strict=True):
                found[row][name] = result
        return [_total(each, results) for each, results in zip(shares, found, strict=True)]

    def ahead(self, sample: RewardInput, group: Sequence[RewardInput]) -> None:
        """See `RewardFunction`; a reward that only rows name is not loaded for it."""
        for name, _ in self._shares(sample):
            if name in self._rewards:
                self._rewards[name].ahead(sample, group)

    def _shares(self, sample: RewardInput) -> Sequence[tuple[str, str]]:
        return shares_of(sample.reward) if sample.reward else self._default

    def close(self) -> None:
        for reward in self._rewards.values():
            reward.close()

    def _judge(self, name: str, samples: Sequence[RewardInput]) -> list[RewardResult]:
        reward = self._rewards[name]
        try:
            return reward(samples)
        except RunError as error:
            if self._on_error == "stop":
                raise
            # One sample at a time shows which of them fail; not where each would wait as long as the batch did.
            if error.problems[0].id != REWARD_FAILED.id or isinstance(error.__cause__, TookTooLong):
                raise
            first = error
        results = [_one(reward, sample) for sample in samples]
        failed = sum(result.failed for result in results)
        if failed == len(results) > 1:
            raise first
        does = "scored 0" if self._on_error == "zero" else "left out"
        log.warning("%d of %d samples could not be judged and are %s: %s", failed, len(results), does, first)
        return results


def _one(reward: CheckedReward, sample: RewardInput) -> RewardResult:
    try:
        return reward([sample])[0]
    except RunError:
        return RewardResult(0.0, failed=True)


def _total(shares: Sequence[tuple[str, str]], results: dict[str, RewardResult]) -> RewardResult:
    """The result of the only reward, or the weighted sum, whose parts are the rewards and theirs."""
    if len(shares) == 1 and float(shares[0][1]) == 1:
        return results[shares[0][0]]
    parts: dict[str, float] = {}
    for name, result in results.items():
        parts |= {name: result.reward} | {f"{name}/{part}": number for part, number in result.parts.items()}
    total = sum(float(weight) * results[name].reward for name, weight in shares)
    return RewardResult(total, parts, failed=any(result.failed for result in results.values()))
