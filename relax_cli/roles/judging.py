"""From generated tokens to rewards: what a reward is given, and the judged sample that trains."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from relax_cli.backends.rollout.protocol import Generation
from relax_cli.data.prompts import Prompt
from relax_cli.data.rewards import RewardFunction, RewardInput, RewardResult
from relax_cli.data.tokenise import prompt_text
from relax_cli.errors import RunError
from relax_cli.roles.spread import Spread


@dataclass(frozen=True)
class Sampled:
    """One response to a prompt, as the engine gave it."""

    row: int
    """Place in the rollout."""
    group: int
    """Place of its prompt in the rollout."""
    prompt: Prompt
    prompt_tokens: list[int]
    generation: Generation


@dataclass(frozen=True)
class Judged(Sampled):
    """One sample from prompt to reward."""

    response: str
    """What was judged: see `response_text`."""
    result: RewardResult


class Judge:
    """The run's reward, and the text that it is given."""

    def __init__(
        self,
        reward: RewardFunction,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str],
        *,
        apply_chat_template: bool,
        trace_file: Path,
    ) -> None:
        """Args:
        stop: strings that end a response.
        trace_file: for the whole traceback of a reward that fails.
        """
        self._reward = reward
        self._tokenizer = tokenizer
        self._stop = stop
        self._apply_chat_template = apply_chat_template
        self._trace_file = trace_file

    def __call__(self, samples: Sequence[Sampled]) -> list[Judged]:
        """Judge a batch.

        Raises:
            RunError: see `RewardFunction`.
        """
        responses = [self._response(sample) for sample in samples]
        inputs = [self._input(s, text) for s, text in zip(samples, responses, strict=True)]
        try:
            results = self._reward(inputs)
        except RunError as error:
            raise self._with_trace(error) from error.__cause__
        return [
            Judged(**vars(sample), response=response, result=result)
            for sample, response, result in zip(samples, responses, results, strict=True)
        ]

    def close(self) -> None:
        """End the reward's processes."""
        self._reward.close()

    def _with_trace(self, error: RunError) -> RunError:
        """The error, which names the file with the traceback of the reward's exception, where it raised one."""
        if error.__cause__ is None:
            return error
        try:
            self._trace_file.parent.mkdir(parents=True, exist_ok=True)
            text = "".join(traceback.format_exception(error.__cause__))
            self._trace_file.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError:
            return error
        more = f"; the whole traceback is in {self._trace_file}"
        return RunError([replace(problem, fix=problem.fix + more) for problem in error.problems])

    def _response(self, sample: Sampled) -> str:
        text: str = self._tokenizer.decode(sample.generation.tokens, skip_special_tokens=True)
        return text if sample.generation.finish_reason == "length" else without_stop(text, self._stop)

    def _input(self, sample: Sampled, response: str) -> RewardInput:
        return RewardInput(
            prompt=prompt_text(self._tokenizer, sample.prompt, apply_chat_template=self._apply_chat_template),
            response=response,
            label=sample.prompt.label,
            # A copy each: what a reward changes must not reach the other samples of the prompt, or the next epoch.
            metadata=copy.deepcopy(sample.prompt.metadata),
            truncated=sample.generation.finish_reason == "length",
            group=sample.group,
        )


def without_stop(response: str, stop: Sequence[str]) -> str:
    """The response up to the stop string that ended it."""
    ends = [place for text in stop if (place := response.find(text)) >= 0]
    return response[: min(ends, default=len(response))]


def reward_spreads(judged: Iterable[Judged]) -> dict[str, Spread]:
    """`reward`, and `reward/part/NAME` for each part, so that no part replaces another metric."""
    results = [sample.result for sample in judged]
    names = sorted({name for result in results for name in result.parts})
    return {
        "reward": Spread.of(result.reward for result in results),
        **{
            f"reward/part/{name}": Spread.of(result.parts[name] for result in results if name in result.parts)
            for name in names
        },
    }
