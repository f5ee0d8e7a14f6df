"""Calls rewards on a batch, each sample by its own, and refuses everything but one usable number for each."""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from math import isfinite
from typing import Any, Literal

from relax_cli.config.data_section import shares_of
from relax_cli.data.rewards.types import REWARD, BatchReward, JudgesAhead, RewardInput, RewardResult
from relax_cli.data.values import printable
from relax_cli.errors import RunError, problem_kind
from relax_cli.plugin.user_code import TookTooLong, UserCodeError, from_here, settings_kept, user_code

log = logging.getLogger(__name__)

MOST_REWARD = 1e15
"""The trainer squares rewards in float32."""
MOST_PART = 1e100
"""Parts are only averaged, in float64."""
MOST_TEXT = 500
"""Characters of an exception's text that are shown."""
MOST_VALUE = 100
"""Characters of a value that are shown."""
REWARD_FAILED = problem_kind(
    "reward-failed",
    "Reward",
    "The reward raised an exception, or returned something other than one finite number for each sample.",
)


class CheckedReward:
    """A reward from a function of anybody's."""

    def __init__(self, name: str, function: BatchReward, key: str | None, seconds: float = 3600.0) -> None:
        """`seconds` is the deadline of each batch."""
        self._name = name
        self._function = function
        self._key = key
        self._seconds = seconds
        self._runner = asyncio.Runner()

    def __call__(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        """Judge a batch. Without samples, such as on a worker without a share, the function is not called.
        Raises RunError: it failed, or returned something other than one finite number for each sample."""
        if not samples:
            return []
        try:
            with user_code(seconds=self._seconds), settings_kept():
                scores = self._scores(samples)
                return [self._result(score, sample) for score, sample in zip(scores, samples, strict=True)]
        except UserCodeError as error:
            raise self._raised(error, samples) from error.__cause__

    def ahead(self, sample: RewardInput, group: Sequence[RewardInput]) -> None:
        """See `JudgesAhead`; does nothing where the reward cannot."""
        if isinstance(self._function, JudgesAhead):
            self._function.ahead(sample, group)

    def close(self) -> None:
        """End the worker processes, if there are any."""
        self._runner.close()
        close: Callable[[], None] | None = getattr(self._function, "close", None)
        if close is not None:
            close()

    def _scores(self, samples: Sequence[RewardInput]) -> list[Any]:
        # A list of its own: the caller's must not change.
        returned = _finished(self._function(list(samples)), self._runner)
        if isinstance(returned, str | bytes | Mapping | Set) or not hasattr(returned, "__iter__"):
            what, expected = f"returned a {type(returned).__name__} for a batch", f"a list of {len(samples)} scores"
            raise self._error(what, _shown(returned), expected)
        # A generator may have no end.
        scores = [_finished(score, self._runner) for score in islice(returned, len(samples) + 1)]
        if len(scores) != len(samples):
            got = str(len(scores)) if len(scores) < len(samples) else f"more than {len(samples)}"
            raise self._error("returned another number of scores than samples", got, str(len(samples)))
        return scores

    def _result(self, score: Any, sample: RewardInput) -> RewardResult:
        if isinstance(score, RewardResult):
            score = {**score.parts, REWARD: score.reward}
        if not isinstance(score, Mapping):
            if self._key is not None:
                raise self._error("returned one number, so there is no part to pick", _shown(score), self._key, sample)
            return RewardResult(self._number(score, sample, MOST_REWARD))
        named = {printable(str(name)): value for name, value in score.items()}
        numbers = {name: self._number(value, sample, MOST_PART, name) for name, value in named.items()}
        reward = self._pick(numbers, sample)
        parts = {name: number for name, number in numbers.items() if name != REWARD}
        return RewardResult(self._number(reward, sample, MOST_REWARD), parts)

    def _pick(self, numbers: dict[str, float], sample: RewardInput) -> float:
        key = self._key
        if key is None:
            key = REWARD if REWARD in numbers or len(numbers) != 1 else next(iter(numbers))
        if key not in numbers:
            what = "returned several parts" if self._key is None and numbers else f"returned no part {key!r}"
            expected = self._key or f"a part called {REWARD}, or a --reward-key"
            fix = f"--reward-key {next(iter(numbers))}" if numbers else ""
            raise self._error(what, ", ".join(numbers) or "no parts", expected, sample, fix)
        return numbers[key]

    def _number(self, value: Any, sample: RewardInput, most: float, name: object = "") -> float:
        number = as_float(value)
        called = f" as {name}" if name != "" else ""
        if number is None or not isfinite(number):
            raise self._error(
                f"returned something that is not a finite number{called}", _shown(value), "a number", sample
            )
        if abs(number) > most:
            what = f"returned a number that is too large to train with{called}"
            raise self._error(what, _shown(value), f"at most {most:g} in size", sample)
        return number

    def _raised(self, error: UserCodeError, samples: Sequence[RewardInput]) -> RunError:
        cause = error.__cause__
        assert cause is not None
        if not error.frames and cause.__cause__ is not None:
            # Python replaces a StopIteration of a coroutine by a RuntimeError of its own.
            error = UserCodeError(cause.__cause__)
        # A loop over the samples has the one that it is at in a local variable.
        inner_first = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)][::-1]
        values = [value for frame in inner_first for value in frame.f_locals.values()]
        current = next((value for value in values if any(value is sample for sample in samples)), None)
        last = error.frames[-1] if error.frames else None
        late = isinstance(cause, TookTooLong)
        return self._error(
            f"gave no result within --rm-timeout {self._seconds:g}" if late else f"failed: {_shortened(error.reason)}",
            error.trail,
            sample=current,
            at=from_here(f"{error.place} in {last.name}" if last is not None else error.place),
            batch=len(samples),
            fix=f"make {self._name} faster, or --rm-timeout {self._seconds * 4:g}" if late else "",
        )

    def _error(
        self,
        what: str,
        got: str = "",
        expected: str = "",
        sample: RewardInput | None = None,
        fix: str = "",
        *,
        at: str = "",
        batch: int = 0,
    ) -> RunError:
        whose = sample.describe() if sample is not None else f"a batch of {batch} samples" if batch else ""
        return RunError(
            REWARD_FAILED(
                printable(f"the reward {self._name} {what}"),
                where="; ".join(filter(None, (at, whose))),
                got=printable(got),
                expected=printable(expected),
                fix=fix or f"correct the reward {self._name}",
            )
        )


class ChosenReward:
    """The reward of a run: that of a sample's row, else `--rm-type`; one, or a weighted sum of several."""

    def __init__(
        self,
        default: Sequence[tuple[str, str]],
        load: Callable[[str], CheckedReward],
        on_error: Literal["stop", "zero", "drop"],
    ) -> None:
        """`default` are names and weights, for samples whose row names none."""
        self._default = default
        self._load = load
        self._on_error = on_error
        self._rewards = {name: load(name) for name, _ in default}

    def __call__(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        """Judge a batch. Raises RunError: a reward failed, on the whole batch whatever `--reward-on-error` is."""
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
        """See `JudgesAhead`; a reward that only rows name is not loaded for it."""
        for name, _ in self._shares(sample):
            if name in self._rewards:
                self._rewards[name].ahead(sample, group)

    def _shares(self, sample: RewardInput) -> Sequence[tuple[str, str]]:
        return shares_of(sample.reward) if sample.reward else self._default

    def close(self) -> None:
        """End the worker processes, if there are any."""
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


def as_float(value: Any) -> float | None:
    """The number that a value of the user's is; None where it is none."""
    try:
        # One number in an array or tensor.
        if not isinstance(value, float | int) and callable(getattr(value, "item", None)):
            value = value.item()
        # float() takes the text "1.0", which is a mistake here.
        return None if isinstance(value, str | bytes | bytearray) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _finished(result: Any, runner: asyncio.Runner) -> Any:
    """What an asynchronous function returned, once it is done; any other result as it is."""
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return runner.run(wait())
    # In a notebook a loop runs in this thread already.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: runner.run(wait())).result()


def _shown(value: object) -> str:
    try:
        return _shortened(repr(value), MOST_VALUE)
    except Exception:  # noqa: BLE001 - a repr of the user's
        return f"a {type(value).__name__}"


def _shortened(text: str, most: int = MOST_TEXT) -> str:
    return text if len(text) <= most else f"{text[:most]} …"
