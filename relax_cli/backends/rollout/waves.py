"""Conversations on an engine that generates one batch at a time: whoever is ready takes part in the next batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait

from relax_cli.backends.rollout.protocol import Generation, Opening, Request, Then

GATHER_SECONDS = 1.0
"""How long a batch waits for conversations that are not ready. Where all are ready by then, the batches are the same in
every run, and with them the last bits of the numbers."""


def in_waves(
    openings: Sequence[Opening],
    generate: Callable[[dict[int, Request]], list[Generation]],
    then: Then,
    ended: Callable[[int], object],
) -> None:
    """See `RolloutEngine.converse`.

    Args:
        generate: responses to the prompts of some conversations, by their numbers, in that order.
        ended: told the number of each conversation that has no further prompt.
    """
    waiting = {opening: number for number, opening in enumerate(openings)}
    while waiting:
        wait(waiting, GATHER_SECONDS)
        answered, _ = wait(waiting, return_when=FIRST_COMPLETED)
        # In the order of the conversations, not of their answers.
        numbers = sorted((waiting.pop(answer), answer) for answer in answered)
        ready: dict[int, Request] = {}
        for number, answer in numbers:
            request = answer.result()
            if request is None:
                ended(number)
            else:
                ready[number] = request
        generations = generate(ready) if ready else []
        for number, generation in zip(ready, generations, strict=True):
            waiting[then(number, generation)] = number
