"""From generated tokens to rewards: what a reward is given, and the judged sample as the queue and files have it."""

from __future__ import annotations

import copy
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from relax_cli.backends.rollout.protocol import Generation
from relax_cli.config.schema import Config
from relax_cli.data.prompts import Prompt
from relax_cli.data.rewards import RewardInput, RewardResult
from relax_cli.data.rewards.checked import ChosenReward
from relax_cli.data.rewards.text import overlong_penalty
from relax_cli.data.tokenise import prompt_text
from relax_cli.errors import RunError
from relax_cli.plugin.graph import ROUTES, TOKEN_REWARDS, WEIGHT_VERSIONS
from relax_cli.roles.spread import Spread


@dataclass(frozen=True)
class Sampled:
    """One response to a prompt, as the engine gave it."""

    row: int
    """Place in the rollout."""
    group: int
    """Place of its prompt."""
    prompt: Prompt
    prompt_tokens: list[int]
    generation: Generation


@dataclass
class Trace:
    """What has happened in a multi-turn episode. `T` counts the tokens behind the prompt."""

    mask: list[int] = field(default_factory=list)
    """`[T]`, 1 where the token was sampled, 0 where it was observed."""
    rewards: list[float] = field(default_factory=list)
    """`[T]`, the reward of each turn on its last token."""
    turns: list[dict[str, Any]] = field(default_factory=list)
    """`response`, `reward` and `observation` of each."""


@dataclass(frozen=True)
class Judged(Sampled):
    """One sample from prompt to reward."""

    response: str
    """What was judged: see `response_text`."""
    result: RewardResult
    trace: Trace | None = None
    """Of an episode; None where there is one response."""
    trains: bool = True
    """False where the sample carries no loss: its reward failed, or it was truncated, and options say so."""

    @property
    def last_response(self) -> str:
        """What a model says in the end: the last turn's response, or the only one."""
        return self.response if self.trace is None else str(self.trace.turns[-1]["response"])

    @property
    def mask(self) -> list[int]:
        """1 for each token that trains."""
        if not self.trains:
            return [0] * len(self.generation.tokens)
        return [1] * len(self.generation.tokens) if self.trace is None else self.trace.mask


@dataclass
class Judge:
    """The run's reward, and the text that it is given."""

    reward: ChosenReward
    tokenizer: PreTrainedTokenizerBase
    stop: Sequence[str]
    """Strings that end a response."""
    trace_file: Path
    """For the whole traceback of a reward that fails."""
    _ahead: dict[int, tuple[Generation, RewardInput]] = field(default_factory=dict)
    """What the reward was given before the batch was complete, by the `id` of the response."""

    def __call__(self, samples: Sequence[Sampled]) -> list[Judged]:
        ahead, self._ahead = self._ahead, {}
        inputs = [ahead[id(s.generation)][1] if id(s.generation) in ahead else self._input(s) for s in samples]
        try:
            results = self.reward(inputs)
        except RunError as error:
            raise self._with_trace(error) from error.__cause__
        return [
            Judged(**vars(sample), response=given.response, result=result)
            for sample, given, result in zip(samples, inputs, results, strict=True)
        ]

    def listens(self, samples_per_prompt: int) -> Callable[[Sampled], None]:
        """What to tell of each response of the next batch when it ends, so that it is judged while others grow."""
        self._ahead = ahead = {}
        groups: defaultdict[int, list[RewardInput]] = defaultdict(list)
        lock = threading.Lock()

        def ended(sample: Sampled) -> None:
            with lock:
                given = self._input(sample)
                ahead[id(sample.generation)] = sample.generation, given
                group = groups[sample.group]
                group.append(given)
                self.reward.ahead(given, group if len(group) == samples_per_prompt else ())

        return ended

    def close(self) -> None:
        self.reward.close()

    def _with_trace(self, error: RunError) -> RunError:
        """The error, which names the file with the traceback of the reward's exception, where it raised one."""
        if error.__cause__ is None:
            return error
        try:
            self.trace_file.parent.mkdir(parents=True, exist_ok=True)
            text = "".join(traceback.format_exception(error.__cause__))
            self.trace_file.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError:
            return error
        more = f"; the whole traceback is in {self.trace_file}"
        return RunError([replace(problem, fix=problem.fix + more) for problem in error.problems])

    def _input(self, sample: Sampled) -> RewardInput:
        return RewardInput(
            prompt=prompt_text(self.tokenizer, sample.prompt),
            response=response_text(self.tokenizer, sample.generation, self.stop),
            label=sample.prompt.label,
            # A copy each: what a reward changes must not reach the other samples of the prompt, or the next epoch.
            metadata=copy.deepcopy(sample.prompt.metadata),
            truncated=sample.generation.finish_reason == "length",
            group=sample.group,
            reward=sample.prompt.reward,
        )


def response_text(tokenizer: PreTrainedTokenizerBase, generation: Generation, stop: Sequence[str]) -> str:
    """A response as others see it: without special tokens, and without the stop string that ended it."""
    text: str = tokenizer.decode(generation.tokens, skip_special_tokens=True)
    places = (text.find(end) for end in stop if generation.finish_reason != "length")
    return text[: min((place for place in places if place >= 0), default=None)]


def reward_spreads(judged: Iterable[Judged]) -> dict[str, Spread]:
    """`reward`, and `reward/part/NAME` for each part, so that no part replaces another metric."""
    # What failed and is left out has no reward.
    results = [sample.result for sample in judged if sample.trains or not sample.result.failed]
    spreads = {"reward": Spread.of(result.reward for result in results)}
    for name in sorted({name for result in results for name in result.parts}):
        spreads[f"reward/part/{name}"] = Spread.of(result.parts[name] for result in results if name in result.parts)
    return spreads


def for_training(judged: Judged, config: Config) -> Judged:
    """The sample with `--overlong-penalty` in its reward, and without loss where options say so."""
    section, result, trace = config.reward, judged.result, judged.trace
    if section.overlong_penalty and section.overlong_buffer_len is not None:
        length, longest = len(judged.generation.tokens), config.rollout.rollout_max_response_len
        lost = section.overlong_penalty * overlong_penalty(length, longest=longest, buffer=section.overlong_buffer_len)
        result = replace(result, reward=result.reward - lost, parts=result.parts | {"overlong": -lost})
        if trace is not None and 1 in trace.mask:
            rewards = list(trace.rewards)
            rewards[length - 1 - trace.mask[::-1].index(1)] -= lost
            trace = replace(trace, rewards=rewards)
    truncated = config.algorithm.mask_truncated and judged.generation.finish_reason == "length"
    dropped = section.reward_on_error == "drop" and result.failed
    return replace(judged, result=result, trace=trace, trains=not truncated and not dropped)


def queue_fields(samples: Sequence[Judged], *, versions: bool, routes: bool) -> dict[str, list[Tensor]]:
    """What the rollout role writes of each sample, see `roles/context.py`; `versions` and `routes` only on request."""
    scalar = torch.tensor
    traces = [j.trace for j in samples if j.trace is not None]
    fields = {
        "tokens": [scalar([*j.prompt_tokens, *j.generation.tokens]) for j in samples],
        "prompt_lens": [scalar(len(j.prompt_tokens)) for j in samples],
        "response_lens": [scalar(len(j.generation.tokens)) for j in samples],
        "response_mask": [scalar(j.mask) for j in samples],
        "rollout_log_probs": [scalar(j.generation.log_probs, dtype=torch.float32) for j in samples],
        "rewards": [scalar(j.result.reward, dtype=torch.float32) for j in samples],
        "group_ids": [scalar(j.group) for j in samples],
        "truncated": [scalar(int(j.generation.finish_reason == "length")) for j in samples],
    }
    if traces:
        fields[TOKEN_REWARDS] = [scalar(trace.rewards, dtype=torch.float32) for trace in traces]
    if versions:
        fields[WEIGHT_VERSIONS] = [scalar(j.generation.weight_versions) for j in samples]
    if routes:
        known = (j.generation.routes for j in samples)
        fields[ROUTES] = [torch.from_numpy(np.empty(0, np.int16) if r is None else r.reshape(-1)) for r in known]
    return fields


def sample_record(judged: Judged, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a sample file says of a sample, besides its numbers per token."""
    return {
        "row": judged.row,
        "group": judged.group,
        "source": judged.prompt.source,
        "prompt": str(tokenizer.decode(judged.prompt_tokens, skip_special_tokens=True)),
        "response": judged.response,
        "label": judged.prompt.label,
        "reward": judged.result.reward,
        "reward_parts": judged.result.parts,
        "finish_reason": judged.generation.finish_reason,
        "prompt_token_ids": np.array(judged.prompt_tokens, dtype=np.int32),
        "response_token_ids": np.array(judged.generation.tokens, dtype=np.int32),
        **({"metadata": judged.prompt.metadata} if judged.prompt.metadata else {}),
        **({} if judged.trace is None else {"turns": judged.trace.turns}),
    }
