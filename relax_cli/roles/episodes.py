"""Multi-turn episodes: responses of the engine and observations of an environment in turn, in one sample.

Legend: `T` tokens behind the prompt, sampled and observed ones. Only sampled tokens train.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from relax_cli.backends.rollout.protocol import Generation, Request, RolloutEngine, SamplingParams, newest_routes
from relax_cli.config.schema import EpisodeSection
from relax_cli.data.envs.checked import CheckedEnv
from relax_cli.data.envs.load import EnvFactory, EnvRow
from relax_cli.data.envs.observations import observation_ids
from relax_cli.data.prompts import Prompt
from relax_cli.data.rewards import RewardResult
from relax_cli.plugin.stdout import stdout_as_stderr
from relax_cli.plugin.user_calls import UserCalls, started_loop
from relax_cli.plugin.user_code import settings_kept
from relax_cli.roles.judging import Judged, Trace, response_text

CLOSE_SECONDS = 5.0
"""Time of environments to close after a failure."""


@dataclass(frozen=True)
class Job:
    """A sample to make."""

    row: int
    """Place in the rollout."""
    group: int
    """Place of its prompt in the rollout."""
    prompt: Prompt
    seed: Callable[..., int]
    """Of the first response's noise; with the number of a turn, of that one's; with 0, of the environment."""


@dataclass
class Episodes:
    """Has an engine and environments talk to each other."""

    factory: EnvFactory
    section: EpisodeSection
    tokenizer: PreTrainedTokenizerBase
    encode: Callable[[Prompt], list[int]]
    """Token ids of a prompt."""
    apply_chat_template: bool

    def __post_init__(self) -> None:
        self.calls = UserCalls(self.section.env_timeout)
        self._loop = started_loop("relax-episodes")

    def __call__(self, engine: RolloutEngine, jobs: Sequence[Job], sampling: SamplingParams) -> list[Judged]:
        running = [_Running(self, job, sampling) for job in jobs]
        with stdout_as_stderr(), settings_kept():
            try:
                openings = [self._start(episode.begin()) for episode in running]
                engine.converse(openings, sampling, lambda i, generation: self._start(running[i].turn(generation)))
            finally:
                closing = [self._start(episode.env.close()) for episode in running]
                wait(closing, CLOSE_SECONDS)
            for closed in closing:
                closed.result()
        return [episode.judged() for episode in running]

    def close(self) -> None:
        self.calls.close()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _start(self, what: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(what, self._loop)


class _Running:
    """One episode; its methods run on the loop of `Episodes`, one at a time."""

    def __init__(self, episodes: Episodes, job: Job, sampling: SamplingParams) -> None:
        self.host = episodes
        self.job = job
        self.sampling = sampling
        self.env = CheckedEnv(episodes.factory, episodes.calls, job.prompt.source)
        self.opening = job.prompt
        self.prompt_tokens: list[int] = []
        self.trace = Trace()
        self.log_probs: list[float] = []
        self.tokens: list[int] = []
        self.routes: NDArray[np.int16] | None = None
        self.truncated = False

    async def begin(self) -> Request:
        """The first request: what the environment makes of the row."""
        prompt = copy.deepcopy(self.job.prompt)
        row = EnvRow(prompt.content, prompt.label, prompt.metadata, self.job.seed(0))
        self.opening = replace(self.job.prompt, content=await self.env.reset(row))
        self.prompt_tokens = self.host.encode(self.opening)
        return self._request()

    async def turn(self, generation: Generation) -> Request | None:
        """Have the environment answer; the request of the next turn, or None where the episode ends."""
        host, trace = self.host, self.trace
        self._add(generation.tokens, generation.log_probs)
        self.routes = newest_routes(self.routes, generation.routes)
        response = response_text(host.tokenizer, generation, self.sampling.stop)
        step = await self.env.step(response)
        trace.rewards[-1] = step.reward
        trace.turns.append({"response": response, "reward": step.reward, "observation": step.observation})
        cut = generation.finish_reason == "length"
        self.truncated = cut or not step.done
        if step.observation is None or cut or len(trace.turns) == host.section.max_turns:
            return None
        last, ends = generation.tokens[-1], self.sampling.stop_token_ids
        observed = observation_ids(
            host.tokenizer,
            self.opening,
            step.observation,
            apply_chat_template=host.apply_chat_template,
            # The text of the stop token of the response; the chat template writes it as well.
            sampled_end=host.tokenizer.decode([last], skip_special_tokens=False) if last in ends else "",
        )
        if len(self.tokens) + len(observed) >= self.sampling.max_new_tokens:
            return None
        self._add(observed)
        return self._request()

    def judged(self) -> Judged:
        job, host = self.job, self.host
        return Judged(
            job.row,
            job.group,
            self.opening,
            self.prompt_tokens,
            Generation(self.tokens, self.log_probs, "length" if self.truncated else "stop", routes=self.routes),
            response=host.tokenizer.decode(self.tokens, skip_special_tokens=True),
            result=RewardResult(math.fsum(self.trace.rewards)),
            trace=self.trace,
        )

    def _add(self, tokens: Sequence[int], log_probs: Sequence[float] | None = None) -> None:
        """Append tokens; those without log-probabilities were observed."""
        self.tokens += tokens
        self.log_probs += [0.0] * len(tokens) if log_probs is None else log_probs
        self.trace.mask += [int(log_probs is not None)] * len(tokens)
        self.trace.rewards += [0.0] * len(tokens)

    def _request(self) -> Request:
        turn = len(self.trace.turns)
        return Request(
            (*self.prompt_tokens, *self.tokens),
            self.job.seed(turn) if turn else self.job.seed(),
            self.job.prompt.source,
            self.sampling.max_new_tokens - len(self.tokens),
        )
