"""The rollout engine that runs inside the rollout role's own process, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from relax_cli.backends.rollout.embedded.decoder import Decoder
from relax_cli.backends.rollout.embedded.kv_cache import KVCache, Prefix
from relax_cli.backends.rollout.embedded.sampling import draw_uniforms, sample
from relax_cli.backends.rollout.prompts import check_prompts
from relax_cli.backends.rollout.protocol import Generation, Opening, Request, SamplingParams, Then
from relax_cli.backends.rollout.waves import in_waves
from relax_cli.config.engine_limits import KV_CACHE_BYTES, MOST_ROWS
from relax_cli.models.hf import read_weights
from relax_cli.models.spec import ModelSpec, read_spec

KEPT_BYTES = KV_CACHE_BYTES
"""Most of the keys and values that conversations leave behind between their turns."""
# A batch shrinks in steps of so many rows: each new batch size costs oneDNN milliseconds to make kernels for.
ROW_STEP = 8


def cache_bytes_per_token(spec: ModelSpec) -> int:
    """Bytes of float32 keys and values of one position of one row."""
    return 2 * 4 * spec.num_layers * spec.num_kv_heads * spec.head_dim


class EmbeddedEngine:
    """Batched sampling with a key/value cache; finished rows leave the batch.

    A response depends on its prompt, its seed and the weights alone: not on the rest of the batch, the order
    or the number of engines (up to float32 rounding of the logits).
    """

    def __init__(
        self,
        model_folder: Path,
        *,
        decode: Callable[[list[int]], str] | None,
        max_batch_size: int = MOST_ROWS,
    ) -> None:
        """Load `config.json` and the safetensors files of `model_folder`.

        Args:
            decode: token ids to text, used only to look for stop strings; None where there are none.
            max_batch_size: most rows generated at a time; fewer where their cache would pass 1 GiB.

        Raises:
            ConfigError: the model is of a kind this engine cannot run, or its files are unreadable.
            RunError: its files are incomplete.
        """
        assert max_batch_size >= 1, max_batch_size
        self.decoder = Decoder(read_spec(model_folder))
        self.decoder.load(read_weights(model_folder))
        self._decode = decode
        self._max_batch_size = max_batch_size
        self._cache: KVCache | None = None
        self._awake = True
        self.weight_version = 0

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Generation]:
        """See `RolloutEngine.generate`."""
        return self._batches(dict(enumerate(requests)), sampling) if requests else []

    def converse(self, openings: Sequence[Opening], sampling: SamplingParams, then: Then) -> None:
        """See `RolloutEngine.converse`. What is known of a prompt is not computed again, within `KEPT_BYTES`."""
        kept: dict[int, Prefix] = {}
        in_waves(
            openings,
            lambda requests: self._batches(requests, sampling, kept),
            then,
            ended=lambda number: kept.pop(number, None),
        )

    def load_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `LoadingEngine.load_weights`."""
        self.decoder.load(named)
        self.weight_version = version

    def sleep(self) -> None:
        """Drop the cache."""
        self._awake = False
        self._cache = None

    def wake(self) -> None:
        """Allow generation again."""
        self._awake = True

    def _batches(
        self, requests: dict[int, Request], sampling: SamplingParams, kept: dict[int, Prefix] | None = None
    ) -> list[Generation]:
        """Responses in the order of the requests.

        Args:
            kept: the prefix of each conversation, used and replaced; None where nothing is to be kept.
        """
        assert self._awake, "the rollout engine sleeps; wake it before generating"
        assert not sampling.stop or self._decode is not None, "stop strings need a decoder"
        spec = self.decoder.spec
        check_prompts(list(requests.values()), sampling, spec.vocab_size, spec.max_positions)
        prefixes: dict[int, Prefix] = {}
        for number, request in requests.items() if kept else ():
            prefix = kept.pop(number, None) if kept else None
            if prefix is not None and prefix.begins(request.prompt_tokens):
                prefixes[number] = prefix

        def new_tokens(number: int) -> int:
            known = len(prefixes[number].tokens) if number in prefixes else 0
            return len(requests[number].prompt_tokens) - known

        # Like lengths together keep padding small; equal prompts together are computed once.
        order = sorted(requests, key=lambda number: (new_tokens(number), requests[number].prompt_tokens))
        longest = max(len(request.prompt_tokens) for request in requests.values())
        columns = longest + max(request.limit(sampling) for request in requests.values())
        rows = min(
            self._max_batch_size,
            max(1, KV_CACHE_BYTES // (columns * cache_bytes_per_token(spec))),
        )
        generations: dict[int, Generation] = {}
        for first in range(0, len(order), rows):
            chunk = {number: requests[number] for number in order[first : first + rows]}
            found = self._generate(chunk, sampling, prefixes, kept)
            generations.update(zip(chunk, found, strict=True))
        return [generations[number] for number in requests]

    @torch.inference_mode()
    def _generate(
        self,
        numbered: dict[int, Request],
        sampling: SamplingParams,
        prefixes: dict[int, Prefix],
        kept: dict[int, Prefix] | None,
    ) -> list[Generation]:
        """One batch. `rows`: the requests that still have a cache row; `live`: which of them still run."""
        numbers, requests = list(numbered), list(numbered.values())
        limits_B = torch.tensor([request.limit(sampling) for request in requests])
        limit = int(limits_B.max())
        sampled_B = torch.tensor([request.sampled for request in requests])
        uniforms_BT = draw_uniforms([request.seed for request in requests], limit + int(sampled_B.max()))
        tokens_BT = torch.zeros(len(requests), limit, dtype=torch.int64)
        log_probs_BT = torch.zeros(len(requests), limit)
        lengths_B = limits_B.clone()
        stopped_B = torch.zeros(len(requests), dtype=torch.bool)
        stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.int64)
        rows = torch.arange(len(requests))
        live = torch.ones(len(requests), dtype=torch.bool)

        def keep(leaving: Tensor) -> None:
            """Of rows that leave the cache, keep what the next turn begins with; the last token was not computed."""
            for place in leaving.nonzero().flatten().tolist() if kept is not None else ():
                row = int(rows[place])
                tokens = (*requests[row].prompt_tokens, *tokens_BT[row, : int(lengths_B[row]) - 1].tolist())
                if kept is not None and self._fits(kept, len(tokens)):
                    kept[numbers[row]] = cache.take(place, tokens)

        logits, cache = self._prefill(requests, [prefixes.get(number) for number in numbers], limit)
        for step in range(limit):
            tokens, log_probs = sample(logits, uniforms_BT[rows, sampled_B[rows] + step], sampling)
            tokens_BT[rows, step], log_probs_BT[rows, step] = tokens, log_probs
            ended = live & torch.isin(tokens, stop_ids)
            if sampling.stop:
                ended |= live & self._ends_with_stop(requests, tokens_BT, rows, step, sampling.stop)
            stopped_B[rows[ended]] = True
            lengths_B[rows[ended]] = step + 1
            live &= ~ended & (limits_B[rows] > step + 1)
            running = int(live.sum())
            if running == 0:
                keep(torch.ones_like(live))
                break
            size = -(-running // ROW_STEP) * ROW_STEP
            if size <= len(rows) * 7 // 8:
                # Dropping rows copies the cache, which costs as much as attending to it: not for a few.
                staying = live.logical_not().argsort(stable=True)[:size]
                keep(torch.ones_like(live).index_fill_(0, staying, False))
                cache.select(staying)
                rows, tokens, live = rows[staying], tokens[staying], live[staying]
            logits = self.decoder.step(tokens, cache)
        return _generations(tokens_BT, log_probs_BT, lengths_B, stopped_B)

    def _fits(self, kept: dict[int, Prefix], length: int) -> bool:
        tokens = length + sum(len(prefix.tokens) for prefix in kept.values())
        return tokens * cache_bytes_per_token(self.decoder.spec) <= KEPT_BYTES

    def _prefill(
        self, requests: Sequence[Request], prefixes: Sequence[Prefix | None], limit: int
    ) -> tuple[Tensor, KVCache]:
        prompts = [request.prompt_tokens for request in requests]
        unique = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
        known = dict(zip(prompts, prefixes, strict=True))
        cache = self._sized_cache(len(prompts), max(map(len, prompts)) + limit)
        logits = self.decoder.prefill(list(unique), cache, [known[prompt] for prompt in unique])
        if len(unique) < len(prompts):
            samples = torch.tensor([unique[prompt] for prompt in prompts])
            cache.select(samples)
            logits = logits[samples]
        return logits, cache

    def _sized_cache(self, rows: int, columns: int) -> KVCache:
        if self._cache is None or self._cache.capacity[0] < rows or self._cache.capacity[1] < columns:
            self._cache = None
            self._cache = KVCache(self.decoder.spec, rows, columns)
        return self._cache

    def _ends_with_stop(
        self, requests: Sequence[Request], tokens_BT: Tensor, rows: Tensor, step: int, stop: tuple[str, ...]
    ) -> Tensor:
        assert self._decode is not None
        # A token is at least a byte of text; the margin is for ids that decode to nothing.
        window = max(len(text.encode()) for text in stop) + 8
        new = tokens_BT[rows, max(0, step + 1 - window) : step + 1].tolist()
        before = [requests[row].begun for row in rows.tolist()]
        texts = [self._decode([*old, *tail][-window:]) for old, tail in zip(before, new, strict=True)]
        return torch.tensor([any(text in decoded for text in stop) for decoded in texts])


def _generations(tokens_BT: Tensor, log_probs_BT: Tensor, lengths_B: Tensor, stopped_B: Tensor) -> list[Generation]:
    rows = zip(tokens_BT.tolist(), log_probs_BT.tolist(), lengths_B.tolist(), stopped_B.tolist(), strict=True)
    reasons: dict[bool, Literal["stop", "length"]] = {True: "stop", False: "length"}
    return [
        Generation(tokens[:length], log_probs[:length], reasons[stopped]) for tokens, log_probs, length, stopped in rows
    ]
