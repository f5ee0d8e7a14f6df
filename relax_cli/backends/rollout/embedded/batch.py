"""Responses that are generated side by side: any of them may end, and others take their rows. Tokens are drawn
reproducibly.

Legend: `B` rows, `T` new tokens, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from relax_cli.backends.rollout.embedded.decoder import Decoder
from relax_cli.backends.rollout.embedded.kv_cache import KVCache, Prefix
from relax_cli.backends.rollout.protocol import Decode, Generation, Request, SamplingParams

# Steps are computed for a multiple of so many rows: each new size costs oneDNN milliseconds to make kernels for.
ROW_STEP = 8


class Batch:
    """The running requests have the first rows of the cache; each row is at a position of its own."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        sampling: SamplingParams,
        limit: int,
        decode: Decode | None,
    ) -> None:
        """`limit`: most new tokens of any request; `decode`: needed where there are stop strings."""
        self.cache = cache
        self._part = cache.part(0, 0)
        self.numbers: list[int] = []
        """Of the request in each row."""
        self._requests: list[Request] = []
        self._decoder = decoder
        self._sampling = sampling
        self._stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.int64)
        self._decode = decode
        rows = cache.capacity[0]
        self._tokens_BT = torch.zeros(rows, limit, dtype=torch.int64)
        self._log_probs_BT = torch.zeros(rows, limit)
        self._uniforms_BT = torch.zeros(rows, limit, dtype=torch.float64)
        self._counts_B = torch.zeros(rows, dtype=torch.int64)
        self._limits_B = torch.zeros(rows, dtype=torch.int64)
        self._newest_B = torch.zeros(rows, dtype=torch.int64)
        self._ended_B = torch.zeros(0, dtype=torch.bool)
        self._ended = 0
        self._logits_BV: Tensor | None = None

    @torch.inference_mode()
    def join(self, requests: dict[int, Request], prefixes: dict[int, Prefix]) -> None:
        """Give these requests the next rows. Equal prompts are computed once."""
        first, last = len(self.numbers), len(self.numbers) + len(requests)
        joining = list(requests.values())
        known = {request.prompt_tokens: prefixes.get(number) for number, request in requests.items()}
        order = {prompt: place for place, prompt in enumerate(known)}
        part = self.cache.part(first, last)
        logits = self._decoder.prefill(list(known), part.part(0, len(known)), list(known.values()))
        if len(known) < len(joining):
            sources = torch.tensor([order[request.prompt_tokens] for request in joining])
            part.copy_rows(sources, torch.arange(len(joining)))
            logits = logits[sources]
        self._logits_BV = logits if self._logits_BV is None else torch.cat((self._logits_BV, logits))
        self.numbers += requests
        self._requests += joining
        self._counts_B[first:last] = 0
        self._limits_B[first:last] = torch.tensor([request.limit(self._sampling) for request in joining])
        limit, sampled = self._uniforms_BT.shape[1], [request.sampled for request in joining]
        drawn = draw_uniforms([request.seed for request in joining], limit + max(sampled))
        # The noise of a response that continues begins where that of its first part ended.
        self._uniforms_BT[first:last] = drawn.gather(1, torch.tensor(sampled)[:, None] + torch.arange(limit))

    @torch.inference_mode()
    def sample(self) -> list[tuple[int, int, Generation]]:
        """Draw a token for every request; number, row and response of those that have ended."""
        assert self._logits_BV is not None
        running = len(self.numbers)
        counts_B1 = self._counts_B[:running, None]
        uniforms_B = self._uniforms_BT[:running].gather(1, counts_B1).squeeze(1)
        tokens_B, log_probs_B = sample(self._logits_BV, uniforms_B, self._sampling)
        self._tokens_BT[:running].scatter_(1, counts_B1, tokens_B[:, None])
        self._log_probs_BT[:running].scatter_(1, counts_B1, log_probs_B[:, None])
        self._newest_B[:running] = tokens_B
        counts_B1 += 1
        self._ended_B = self._counts_B[:running] >= self._limits_B[:running]
        stopped_B = self._stopped(tokens_B)
        if stopped_B is not None:
            self._ended_B |= stopped_B
        ended = self._ended_B.nonzero().flatten()
        self._ended = len(ended)
        if not self._ended:
            return []
        stops = [False] * self._ended if stopped_B is None else stopped_B[ended].tolist()
        states = (ended, self._counts_B[ended], self._tokens_BT[ended], self._log_probs_BT[ended])
        generations = []
        for stopped, row, count, tokens, log_probs in zip(stops, *(s.tolist() for s in states), strict=True):
            routes = None
            if self.cache.routes is not None:
                routes = self.cache.routes[row, : len(self._requests[row].prompt_tokens) + count - 1].numpy().copy()
            reason: Literal["stop", "length"] = "stop" if stopped else "length"
            generation = Generation(tokens[:count], log_probs[:count], reason, routes=routes)
            generations.append((self.numbers[row], row, generation))
        return generations

    @torch.inference_mode()
    def step(self) -> None:
        """Drop what has ended and compute the next token's logits for the others."""
        running = len(self.numbers) - self._ended
        if running < len(self.numbers):
            self._drop(running)
        if running == 0:
            self._logits_BV = None
            return
        size = min(self.cache.capacity[0], -(-running // ROW_STEP) * ROW_STEP)
        if len(self._part.lengths_B) != size:
            self._part = self.cache.part(0, size)
        self._logits_BV = self._decoder.step(self._newest_B[:size], self._part)[:running]

    def _drop(self, running: int) -> None:
        """Rows from the end take the places of those that have ended."""
        holes = self._ended_B[:running].nonzero().flatten()
        moved = running + self._ended_B[running:].logical_not().nonzero().flatten()
        if len(holes):
            self.cache.copy_rows(moved, holes)
            tables = self._tokens_BT, self._log_probs_BT, self._uniforms_BT
            for state in (*tables, self._counts_B, self._limits_B, self._newest_B):
                state[holes] = state[moved]
        for hole, source in zip(holes.tolist(), moved.tolist(), strict=True):
            self.numbers[hole], self._requests[hole] = self.numbers[source], self._requests[source]
        del self.numbers[running:], self._requests[running:]
        # Spare rows are computed next to the others, and must stay within the cache.
        self.cache.lengths_B[running:] = 0

    def _stopped(self, tokens_B: Tensor) -> Tensor | None:
        """Which responses end with a stop token or string; None where there are neither."""
        stopped_B = torch.isin(tokens_B, self._stop_ids) if len(self._stop_ids) else None
        if not self._sampling.stop:
            return stopped_B
        rows = zip(self._requests, self._tokens_BT, self._counts_B.tolist(), strict=False)
        newest = [
            [*request.begun, *tokens[:count].tolist()][-self._sampling.stop_window :] for request, tokens, count in rows
        ]
        complete_B = torch.tensor([self._sampling.has_stop(tokens, self._decode) for tokens in newest])
        return complete_B if stopped_B is None else stopped_B | complete_B


def draw_uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """Uniforms in [0, 1) `[B, count]`, float64; row i depends on `seeds[i]` alone.

    A longer draw from the same seed starts with the shorter one: the length limit does not change a response.
    """
    uniforms_BT = torch.empty(len(seeds), count, dtype=torch.float64)
    generator = torch.Generator()
    for row, seed in zip(uniforms_BT, seeds, strict=True):
        row.uniform_(generator=generator.manual_seed(seed))
    return uniforms_BT


def sample(logits_BV: Tensor, uniforms_B: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    top-k, then top-p, truncate and renormalise what is drawn from. The log-probability reported is that of
    the whole softmax at the temperature, which is what a trainer's teacher-forced pass computes.

    Args:
        logits_BV: `[B, V]`, float32.
        uniforms_B: `[B]` in [0, 1), float64.

    Returns:
        tokens `[B]` int64 and log-probabilities `[B]` float32.
    """
    if sampling.temperature != 1.0:
        logits_BV = logits_BV / sampling.temperature
    logp_BV = torch.log_softmax(logits_BV, dim=-1)
    keeps_all_k = sampling.top_k <= 0 or sampling.top_k >= logits_BV.shape[-1]
    if keeps_all_k and sampling.top_p == 1.0:
        tokens_B1 = _invert(logp_BV.exp(), uniforms_B)
    else:
        tokens_B1 = _sample_truncated(logp_BV, uniforms_B, -1 if keeps_all_k else sampling.top_k, sampling.top_p)
    return tokens_B1.squeeze(-1), logp_BV.gather(-1, tokens_B1).squeeze(-1)


def _sample_truncated(logp_BV: Tensor, uniforms_B: Tensor, top_k: int, top_p: float) -> Tensor:
    if top_k > 0:
        sorted_logp_BK, ids_BK = logp_BV.topk(top_k, dim=-1)
    else:
        sorted_logp_BK, ids_BK = logp_BV.sort(dim=-1, descending=True, stable=True)
    # float64: a float32 sum over a large vocabulary is off by more than the mass of a rare token.
    probs_BK = sorted_logp_BK.double().exp()
    if top_p < 1.0:
        mass_before_BK = probs_BK.cumsum(-1) - probs_BK
        limit_B1 = top_p * probs_BK.sum(-1, keepdim=True)
        # The likeliest token has no mass before it, so at least one stays.
        probs_BK = probs_BK.masked_fill(mass_before_BK >= limit_B1, 0.0)
    return ids_BK.gather(-1, _invert(probs_BK, uniforms_B))


def _invert(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """First index `[B, 1]` whose cumulative (unnormalised) probability exceeds `u * total`."""
    cumulative_BV = probs_BV.cumsum(-1, dtype=torch.float64)
    # No draw beyond the end: uniforms are at most 1 - 2**-53, so u * total rounds to less than total. A token
    # of probability 0 does not raise the sum, so it is never the first to exceed anything.
    target_B1 = (uniforms_B * cumulative_BV[:, -1]).unsqueeze(-1)
    return torch.searchsorted(cumulative_BV, target_B1, right=True)
