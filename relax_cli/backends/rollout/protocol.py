"""What the rollout role asks of a rollout engine, whichever engine it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from relax_cli.backends.rollout.sglang.targets import WeightTarget


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

    def __post_init__(self) -> None:
        assert self.max_new_tokens >= 1, self.max_new_tokens
        assert self.temperature > 0, self.temperature
        assert 0 < self.top_p <= 1, self.top_p
        assert self.top_k >= -1, self.top_k
        assert all(self.stop), "an empty stop string matches everywhere"


@dataclass(frozen=True)
class Request:
    """One prompt to continue once."""

    prompt_tokens: tuple[int, ...]
    seed: int
    """All randomness of this response comes from here, whatever else is in the batch."""


@dataclass
class Generation:
    """One response: exactly the ids that were sampled, never decoded and encoded again."""

    tokens: list[int]
    """The response, its stop token included."""
    log_probs: list[float]
    """Log-probability of each token under the full softmax at the sampling temperature (nats)."""
    finish_reason: Literal["stop", "length"]


class RolloutEngine(Protocol):
    """Generates responses with the newest published weights.

    New weights come in one of two ways: where there are `weight_targets`, they are sent there and `weights_updated`
    says so; else they come through `load_weights`.
    """

    @property
    def weight_version(self) -> int:
        """Version of the last complete update; 0 for the weights of the model folder."""

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Generation]:
        """Continue every prompt; results are in the order of `requests`.

        Raises:
            RunError: a prompt this model cannot take (ids outside its vocabulary, empty, too long), or an engine that
                cannot complete a response with its newest weights.
        """

    def weight_targets(self) -> Sequence[WeightTarget]:
        """Servers to send weights to; none where the engine takes them itself."""

    def weights_updated(self, version: int) -> None:
        """The weights `version` have been sent to every target.

        Raises:
            RunError: a target does not serve them.
        """

    def load_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights; `named` yields Hugging Face names and tensors, which are copied, not kept.

        Raises:
            RunError: a name is unknown, missing or given twice, or a shape is wrong.
        """

    def sleep(self) -> None:
        """Give up memory that can be given up; nothing can be generated until `wake`."""

    def wake_for_weights(self) -> None:
        """Be ready to take new weights, with as little memory as that needs; `wake` or `sleep` follows."""

    def wake(self) -> None:
        """Be ready to generate."""

    def health(self) -> bool:
        """Whether the engine can answer."""

    def revive(self) -> int:
        """After a failure: start again what has ended, and sleep; how many were started. They need new weights."""

    def close(self) -> None:
        """End every process that belongs to the engine; safe to call twice."""
