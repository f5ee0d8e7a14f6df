"""The model behind the contract server: our embedded engine, seeded per request, with SGLang's noise by position."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from relax_cli.backends.rollout.embedded.engine import EmbeddedEngine
from relax_cli.backends.rollout.embedded.kv_cache import KVCache
from relax_cli.backends.rollout.protocol import Generation, Request, SamplingParams
from relax_cli.models.hf import HfWeights

GATHER_SECONDS = 0.02


@dataclass(frozen=True)
class Job:
    """One request in the queue."""

    tokens: tuple[int, ...]
    seed: int
    sampling: SamplingParams
    future: Future[Generation]


class OtherShape(Exception):
    """A weight has another shape than the model's."""


class ServedModel:
    """Generates in one thread, all that waits as one batch; updates take turns with batches."""

    def __init__(self, folder: Path) -> None:
        from relax_cli.data.tokenise import load_tokenizer

        has_tokenizer = (folder / "tokenizer.json").exists() or (folder / "tokenizer_config.json").exists()
        decode = load_tokenizer(folder).decode if has_tokenizer else None
        self.engine = EmbeddedEngine(folder, decode=decode)
        self.spec = self.engine.decoder.spec
        self._weights: dict[str, Tensor] = {name: tensor.clone() for name, tensor in HfWeights(folder).items()}
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Job] = SimpleQueue()
        # The prompt that a seed was first used with: what is longer continues its response.
        self._prompts: dict[int, tuple[int, ...]] = {}
        threading.Thread(target=self._serve, daemon=True).start()

    def submit(self, tokens: tuple[int, ...], params: dict[str, Any]) -> Future[Generation]:
        """Queue one request."""
        sampling = SamplingParams(
            max_new_tokens=params["max_new_tokens"],
            temperature=params.get("temperature", 1.0),
            top_p=params.get("top_p", 1.0),
            top_k=params.get("top_k", -1),
            stop_token_ids=tuple(params.get("stop_token_ids") or ()),
            stop=tuple(params.get("stop") or ()),
        )
        job = Job(tokens, params.get("sampling_seed") or 42, sampling, Future())
        self._queue.put(job)
        return job.future

    def routes(self, tokens: Sequence[int]) -> str:
        """The experts of every token but the last, in every layer, as the real server writes them."""
        with self._lock, torch.inference_mode():
            cache = KVCache(self.spec, 1, len(tokens), routes=True)
            self.engine.decoder.prefill([tokens[:1]], cache)
            for token in tokens[1:-1]:
                self.engine.decoder.step(torch.tensor([token]), cache)
        assert cache.routes is not None
        return base64.b64encode(cache.routes[0, : len(tokens) - 1].int().numpy().tobytes()).decode()

    def update(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Take tensors over; `apply` makes them the model's."""
        for name, tensor in named:
            if name not in self._weights:
                continue  # a warning in the log of the real one
            if tensor.shape != self._weights[name].shape:
                raise OtherShape(f"{name} of shape {tuple(tensor.shape)}")
            self._weights[name] = tensor.detach().to("cpu", torch.float32).clone()

    def replace(self, folder: Path) -> None:
        """Take all tensors of a model folder over."""
        self.update(HfWeights(folder).items())

    def apply(self) -> None:
        """Make the tensors taken over the model's."""
        with self._lock:
            self.engine.decoder.load(self._weights.items())

    def checksums(self) -> dict[str, str]:
        """A hash of each weight."""
        return {n: hashlib.sha256(t.numpy().tobytes()).hexdigest()[:16] for n, t in sorted(self._weights.items())}

    def lose(self) -> None:
        """Forget the weights, as released memory does."""
        self._weights = {name: torch.zeros_like(tensor) for name, tensor in self._weights.items()}
        self.apply()

    def _serve(self) -> None:
        while True:
            jobs = [self._queue.get()]
            try:
                while True:
                    jobs.append(self._queue.get(timeout=GATHER_SECONDS))
            except Empty:
                pass
            for sampling in {job.sampling for job in jobs}:
                self._batch([job for job in jobs if job.sampling == sampling], sampling)

    def _batch(self, jobs: list[Job], sampling: SamplingParams) -> None:
        skips = []
        for job in jobs:
            first = self._prompts.setdefault(job.seed, job.tokens)
            if job.tokens[: len(first)] != first:
                first = self._prompts[job.seed] = job.tokens
            skips.append(len(job.tokens) - len(first))
        requests = [Request(job.tokens, job.seed, sampled=skip) for job, skip in zip(jobs, skips, strict=True)]
        try:
            with self._lock:
                generations = self.engine.generate(requests, sampling)
        except Exception as error:  # noqa: BLE001 - it belongs to the requests that wait
            for job in jobs:
                job.future.set_exception(error)
            return
        for job, generation in zip(jobs, generations, strict=True):
            job.future.set_result(generation)
