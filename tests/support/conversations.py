"""Conversations with an engine: responses, each followed by tokens that depend on it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from relax_cli.backends.rollout.protocol import Generation, Opening, Request, RolloutEngine, SamplingParams

Turns = list[tuple[Request, Generation]]


def known(request: Request | None) -> Opening:
    answer: Opening = Future()
    answer.set_result(request)
    return answer


def converse(engine: RolloutEngine, openings: Sequence[Request], sampling: SamplingParams, turns: int) -> list[Turns]:
    """Requests and responses of each conversation; number i has `turns + i % 2` of them, and a limit of its own."""
    asked = [replace(request, most_tokens=3 + i % 3) for i, request in enumerate(openings)]
    done: list[Turns] = [[] for _ in openings]

    def then(i: int, generation: Generation) -> Opening:
        request = asked[i]
        done[i].append((request, generation))
        if len(done[i]) == turns + i % 2:
            return known(None)
        prompt = (*request.prompt_tokens, *generation.tokens, *range(2, 2 + i % 4))
        asked[i] = replace(request, prompt_tokens=prompt, seed=request.seed + 1)
        return known(asked[i])

    engine.converse([known(request) for request in asked], sampling, then)
    return done
