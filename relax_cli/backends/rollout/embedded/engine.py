"""The rollout engine that runs inside the rollout role's own process, on the CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path

from torch import Tensor

from relax_cli.backends.rollout.embedded.batch import Batch
from relax_cli.backends.rollout.embedded.decoder import Decoder
from relax_cli.backends.rollout.embedded.kv_cache import KVCache, Prefix, in_blocks
from relax_cli.backends.rollout.protocol import Decode, Ended, Generation, Opening, Request, SamplingParams, Then
from relax_cli.config.placement import KV_CACHE_BYTES, MOST_ROWS
from relax_cli.models.hf import HfWeights
from relax_cli.models.spec import read_spec
from relax_cli.preflight.memory.estimate import engine_rows, kv_cache_bytes

KEPT_BYTES = KV_CACHE_BYTES
"""Most of the keys and values that conversations leave behind between their turns."""
GATHER_SECONDS = 1.0
"""How long a batch waits for conversations that are not ready. Where all are ready by then, the batches are the same in
every run, and with them the last bits of the numbers."""


class EmbeddedEngine:
    """Batched sampling with a key/value cache; finished rows leave the batch, and waiting prompts take their places.

    A response depends on its prompt, its seed and the weights alone: not on the rest of the batch, the order
    or the number of engines (to the bit where the matrix products of torch compute each row alike in any batch).
    """

    def __init__(
        self,
        model_folder: Path,
        *,
        decode: Decode | None,
        max_batch_size: int = MOST_ROWS,
    ) -> None:
        """Load `config.json` and the safetensors files of `model_folder`.

        `decode` turns token ids into text, to look for stop strings; `max_batch_size` is the most rows generated at a
        time, fewer where their cache would pass 1 GiB.
        Raises ConfigError or RunError: this engine cannot run such a model, or files are unreadable or incomplete.
        """
        assert max_batch_size >= 1, max_batch_size
        self.decoder = Decoder(read_spec(model_folder))
        self.decoder.load(HfWeights(model_folder).items())
        self._decode = decode
        self._max_batch_size = max_batch_size
        self._cache: KVCache | None = None
        self._awake = True
        self.weight_version = 0

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, ended: Ended | None = None
    ) -> list[Generation]:
        """See `RolloutEngine.generate`."""
        return self._batches(dict(enumerate(requests)), sampling, ended=ended) if requests else []

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
        self,
        requests: dict[int, Request],
        sampling: SamplingParams,
        kept: dict[int, Prefix] | None = None,
        ended: Ended | None = None,
    ) -> list[Generation]:
        """Responses in the order of the requests.

        `kept` has the prefix of each conversation, which is used and replaced; None where nothing is to be kept.
        """
        assert self._awake, "the rollout engine sleeps; wake it before generating"
        spec = self.decoder.spec
        for request in requests.values():
            request.check(sampling, spec.vocab_size, spec.max_positions)
        prefixes = {number: kept.pop(number) for number in requests if number in kept} if kept else {}
        prefixes = {number: p for number, p in prefixes.items() if p.begins(requests[number].prompt_tokens)}

        def new_tokens(number: int) -> int:
            known = len(prefixes[number].tokens) if number in prefixes else 0
            return len(requests[number].prompt_tokens) - known

        # Like lengths together keep padding small; equal prompts together are computed once.
        order = sorted(requests, key=lambda number: (new_tokens(number), requests[number].prompt_tokens))
        limit = max(request.limit(sampling) for request in requests.values())
        columns = in_blocks(max(len(request.prompt_tokens) for request in requests.values()) + limit)
        rows = min(self._max_batch_size, engine_rows(spec, len(order), columns))
        batch = Batch(self.decoder, self._sized_cache(rows, columns, sampling.routes), sampling, limit, self._decode)
        generations: dict[int, Generation] = {}
        waiting = deque(order)
        while waiting or batch.numbers:
            # A few at a time: a pass over the prompt of one costs almost as much as over those of some.
            free = rows - len(batch.numbers)
            if waiting and free >= max(1, rows // 8):
                joining = [waiting.popleft() for _ in range(min(free, len(waiting)))]
                batch.join({number: requests[number] for number in joining}, prefixes)
            for number, row, generation in batch.sample():
                generations[number] = generation
                if ended is not None:
                    ended(number, generation)
                if kept is not None:
                    # The last token was not computed.
                    tokens = (*requests[number].prompt_tokens, *generation.tokens[:-1])
                    total = len(tokens) + sum(len(prefix.tokens) for prefix in kept.values())
                    if kv_cache_bytes(spec, 1, total) <= KEPT_BYTES:
                        kept[number] = batch.cache.take(row, tokens)
            batch.step()
        return [generations[number] for number in requests]

    def _sized_cache(self, rows: int, columns: int, routes: bool) -> KVCache:
        cache, self._cache = self._cache, None
        if cache is None or cache.capacity[0] < rows or cache.capacity[1] < columns or routes == (cache.routes is None):
            cache = None  # Two caches never exist side by side.
            cache = KVCache(self.decoder.spec, rows, columns, routes=routes)
        cache.used = 0
        self._cache = cache
        return cache


def in_waves(
    openings: Sequence[Opening],
    generate: Callable[[dict[int, Request]], list[Generation]],
    then: Then,
    ended: Callable[[int], object],
) -> None:
    """See `RolloutEngine.converse`: whoever is ready takes part in the next batch.

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
