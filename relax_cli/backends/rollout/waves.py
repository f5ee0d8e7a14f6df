"""Conversations on an engine that generates one batch at a time: whoever is ready takes part in the next batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait

from relax_cli.backends.rollout.protocol import Generation, Opening, Request, Then

GATHER_SECONDS = 1.0
"""How long a batch waits for conversations that are not ready. Where all are ready by then, the batches are the same in
every run, and with them the last bits of the numbers."""


def in_waves(openings: Sequence[Opening], generate: Callable[[list[Request]], list[Generation]], then: Then) -> None:
    """See `RolloutEngine.converse`."""
    waiting = {opening: number for number, opening in enumerate(openings)}
    while waiting:
        wait(waiting, GATHER_SECONDS)
        answered, _ = wait(waiting, return_when=FIRST_COMPLETED)
        # In the order of the conversations, not of their answers.
        numbers = sorted((waiting.pop(answer), answer) for answer in answered)
        ready = {number: request for number, answer in numbers if (request := answer.result()) is not None}
        generations = generate(list(ready.values())) if ready else []
        for number, generation in zip(ready, generations, strict=True):
            waiting[then(number, generation)] = number
