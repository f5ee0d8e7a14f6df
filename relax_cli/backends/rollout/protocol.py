"""What the roles need of a rollout engine. An engine also implements one of `LoadingEngine` and `ServerEngine`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from relax_cli.backends.rollout.targets import WeightTarget
from relax_cli.errors import RunError, problem_kind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from relax_cli.backends.device import Device
    from relax_cli.backends.megatron.weight_buckets import Bucket


ROLLOUT_PROMPT = problem_kind(
    "rollout-prompt",
    "During a run",
    "A prompt does not fit the model: an unknown token, or too long.",
    option="--prompt-data",
)

Decode = Callable[[list[int]], str]
"""Text of token ids, special tokens included."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn; one record for all requests of a call."""

    max_new_tokens: int
    temperature: float
    """Above 0. For greedy decoding use `top_k=1`."""
    top_p: float
    """Nucleus mass in (0, 1]; 1 keeps every token."""
    top_k: int
    """Sample among the k likeliest tokens; -1 (or 0) keeps every token."""
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...] = ()
    """A response ends with the token that completes one of these strings."""
    routes: bool = False
    """Say which experts every token went to."""

    def __post_init__(self) -> None:
        assert self.max_new_tokens >= 1, self.max_new_tokens
        assert self.temperature > 0, self.temperature
        assert 0 < self.top_p <= 1, self.top_p
        assert self.top_k >= -1, self.top_k
        assert all(self.stop), "an empty stop string matches everywhere"

    @property
    def stop_window(self) -> int:
        """How many of the newest tokens complete a stop string, if any do."""
        # A token is at least a byte of text; the margin is for ids that decode to nothing.
        return max(len(end.encode()) for end in self.stop) + 8

    def has_stop(self, tokens: list[int], decode: Decode | None) -> bool:
        """Whether a stop string is in the text of these tokens."""
        assert decode is not None, "stop strings need a decoder"
        text = decode(tokens)
        return any(end in text for end in self.stop)


@dataclass(frozen=True)
class Request:
    """One prompt to continue once."""

    prompt_tokens: tuple[int, ...]
    seed: int
    """All randomness of this response comes from here, whatever else is in the batch."""
    source: str = ""
    """File and line of the prompt, for messages."""
    most_tokens: int | None = None
    """Most new tokens; those of the `SamplingParams` when None."""
    sampled: int = 0
    """How many of the last prompt tokens are the beginning of this response: its noise and stop strings continue."""

    def limit(self, sampling: SamplingParams) -> int:
        """Most new tokens of this response."""
        return sampling.max_new_tokens if self.most_tokens is None else self.most_tokens

    def check(
        self, sampling: SamplingParams, vocab_size: int, max_positions: int, max_prompt: int | None = None
    ) -> None:
        """Raises RunError: an id outside the vocabulary, no prompt, or one that leaves no room for a response."""
        prompt, limit = self.prompt_tokens, self.limit(sampling)
        room = max_positions - len(prompt)
        fix = "use the tokenizer that belongs to the model, and prompts that fit it"
        if not prompt:
            message, got, expected = "a prompt has no tokens", "0 tokens", "at least 1 token"
        elif min(prompt) < 0 or max(prompt) >= vocab_size:
            bad = next(token for token in prompt if not 0 <= token < vocab_size)
            message = f"prompt token id {bad} is outside the model's vocabulary"
            got, expected = str(bad), f"0 to {vocab_size - 1}"
        elif max_prompt is not None and len(prompt) > max_prompt:
            message = "a prompt is longer than the server accepts"
            got, expected = f"{len(prompt)} tokens", f"at most {max_prompt}"
            fix = f"--rollout-max-prompt-len {max_prompt} --overlong-prompts drop, or a server with a longer context"
        elif limit > room:
            message = f"a prompt of {len(prompt)} tokens leaves no room for {limit} new ones"
            got, expected = f"{len(prompt) + limit} positions", f"at most {max_positions}"
            fix = f"ask for at most {room} new tokens, or use shorter prompts" if room > 0 else "use shorter prompts"
        else:
            return
        raise RunError(ROLLOUT_PROMPT(message, fix=fix, got=got, expected=expected, where=self.source))

    @property
    def begun(self) -> tuple[int, ...]:
        """What there is of the response."""
        return self.prompt_tokens[len(self.prompt_tokens) - self.sampled :]


@dataclass
class Generation:
    """One response: exactly the ids that were sampled, never decoded and encoded again."""

    tokens: list[int]
    """The response, its stop token included."""
    log_probs: list[float]
    """Log-probability of each token under the full softmax at the sampling temperature (nats)."""
    finish_reason: Literal["stop", "length"]
    weight_versions: list[int] = field(default_factory=list)
    """Of the weights that sampled each token, where a response may have tokens of several; else empty."""
    routes: NDArray[np.int16] | None = None
    """`[S, layers, k]`: the experts of every token of prompt and response but the last; negative where they are not
    known. None where they were not requested."""


def newest_routes(before: NDArray[np.int16] | None, now: NDArray[np.int16] | None) -> NDArray[np.int16] | None:
    """The routes of a sample that was continued: those of its newest pass, else those that were known before."""
    if before is not None and now is not None:
        known = now[: len(before)]
        known[known < 0] = before[known < 0]
    return now


Opening = Future[Request | None]
"""A prompt that is being made."""
Then = Callable[[int, Generation], Opening]
Ended = Callable[[int, Generation], object]


class RolloutEngine(Protocol):
    """Generates responses with the newest published weights."""

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, ended: Ended | None = None
    ) -> list[Generation]:
        """Continue every prompt; results are in the order of `requests`.

        `ended` is called with the place of each request and its response as soon as that has ended, from any thread.
        Raises RunError: a prompt this model cannot take (ids outside its vocabulary, empty, too long), or an engine
        that cannot complete a response with its newest weights.
        """

    def converse(self, openings: Sequence[Opening], sampling: SamplingParams, then: Then) -> None:
        """Continue prompts that grow: each response is handed to `then`, whose answer is continued next, until None.

        No conversation waits for another one's answer, as far as the engine can.

        Args:
            openings: the first prompt of each conversation, once it is known.
            then: called with the number of a conversation and its response; from several threads at a time.

        Raises RunError: see `generate`; also what an opening or an answer raised.
        """

    def sleep(self) -> None:
        """Give up memory that can be given up; nothing can be generated until `wake`."""

    def wake(self) -> None:
        """Be ready to generate."""


@runtime_checkable
class LoadingEngine(RolloutEngine, Protocol):
    """An engine inside the worker, which takes new weights itself."""

    def load_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights; `named` yields Hugging Face names and tensors, which are copied, not kept.
        Raises RunError: a name is unknown, missing or given twice, or a shape is wrong."""


@runtime_checkable
class ServerEngine(RolloutEngine, Protocol):
    """An engine that generates on servers, to which the actor sends new weights."""

    @property
    def targets(self) -> Sequence[WeightTarget]:
        """The servers."""

    @property
    def needs_weights(self) -> bool:
        """Whether weights have to be sent before anything is generated: a sleeping server does not keep them."""

    def weights_updated(self, version: int) -> None:
        """The weights `version` have been sent to every target. Raises RunError: one does not serve them."""

    def wake_for_weights(self) -> None:
        """Be ready to take new weights, with as little memory as that needs; `wake` or `sleep` follows."""

    def revive(self) -> int:
        """After a failure: start again what has ended, and sleep; how many were started. They need new weights."""

    def close(self) -> None:
        """End every process that belongs to the engine; safe to call twice."""


class ServerDied(RunError):
    """A server of this run ended by itself while it was in use."""


class WeightsNotSent(RunError):
    """New weights did not reach a server, which has a mixture of old and new ones now."""


class WeightSender(Protocol):
    """Sends the actor's weights to the same servers again and again; one instance per rank of the actor."""

    @property
    def targets(self) -> Sequence[WeightTarget]:
        """The servers."""

    def send(self, buckets: Callable[[int], Iterator[Bucket]], version: int) -> None:
        """Replace the weights of every server; iterating over `buckets(most_bytes)` is a collective of all ranks.
        Raises RunError: names the server and the bucket; that server's weights are a mixture now."""


OpenSender = Callable[[Sequence[WeightTarget], "Device"], WeightSender]
"""How a rank of the actor reaches the servers; all ranks call it."""
