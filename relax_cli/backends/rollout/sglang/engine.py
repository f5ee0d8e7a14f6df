"""The rollout engine that generates on SGLang servers, local or external, over HTTP.

Each sample is a request of its own, so that one aborted or lost request costs one sample's time and nothing else.
A request is repeated where the connection broke, under a new id after the old one was aborted; every sample
ends up with exactly one complete response or the whole call raises.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from relax_cli.backends.rollout.protocol import (
    Decode,
    Ended,
    Generation,
    Opening,
    Request,
    SamplingParams,
    ServerDied,
    Then,
)
from relax_cli.backends.rollout.sglang.client import (
    CancelledFault,
    ConnectionFault,
    DeadlineFault,
    SglangClient,
    SglangError,
    declare,
)
from relax_cli.backends.rollout.sglang.memory import MEMORY_SECONDS, ServerMemory
from relax_cli.backends.rollout.sglang.replies import Part, check_served, generate_payload, read_part
from relax_cli.backends.rollout.sglang.server import LocalServer
from relax_cli.backends.rollout.targets import WeightTarget
from relax_cli.config.schema import RolloutSection
from relax_cli.errors import RunError
from relax_cli.models.spec import MoeSpec

ABORTED = declare(
    "sglang-aborted",
    "A server aborted one sample again and again. Aborted responses are never trained on as if they were complete.",
)

CONNECTION_TRIES = 4
"""Requests of one sample that may break before the run gives up."""
ABORT_TRIES = 16
"""Times in a row that a server may abort one sample without any progress."""
ABORT_SECONDS = 2.0
"""Longest pause after an abort."""
ENDING_SECONDS = 10.0
"""Time for a server that crashed to end, after its connections closed, and for one to take note that it may stop."""
REVIVE_SECONDS = 2.0
"""Time for a server that broke its connections to end."""

log = logging.getLogger(__name__)


@dataclass
class _Batch:
    """One call of `converse`."""

    sampling: SamplingParams
    size: int
    cancelled: threading.Event = field(default_factory=threading.Event)
    repeated: Counter[str] = field(default_factory=Counter)
    """Requests that were made again, by the server and what it did."""


AS_LOADED = "default"
"""What a server calls the weights of its model folder."""


class SglangEngine:
    """See `ServerEngine`. Weights are sent to the servers by the actor, not through this engine."""

    def __init__(
        self,
        targets: Sequence[WeightTarget],
        *,
        vocab_size: int,
        max_positions: int,
        max_prompt: int | None = None,
        rollout: RolloutSection,
        concurrency: int,
        release_memory: bool = False,
        backoff: float = 0.25,
        servers: Sequence[LocalServer] = (),
        decode: Decode | None = None,
        experts: MoeSpec | None = None,
    ) -> None:
        """
        Args:
            targets: the servers; requests are dealt to them in turn.
            max_prompt: most tokens that the servers accept as input.
            concurrency: most requests at a time to one server.
            release_memory: sleeping gives up the servers' weights and KV cache.
            backoff: seconds before the first repetition, doubled for each further one.
            experts: the model, where it is a mixture of experts.
            servers: those of them that this engine owns, all or none. They are running, and end with `close`.
        """
        assert targets, "an engine without a server"
        assert len(servers) in (0, len(targets)), (len(servers), len(targets))
        self.targets = tuple(targets)
        self.clients = tuple(SglangClient(target.address) for target in targets)
        self.servers = tuple(servers)
        self.rollout = rollout
        self.concurrency = concurrency
        self.release_memory = release_memory
        self.backoff = backoff
        self.weight_version = "0"
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._max_prompt = max_positions if max_prompt is None else max_prompt
        self._decode = decode
        self._experts = experts
        self._request_numbers = itertools.count()
        self._memory = ServerMemory(self.clients, self._tell)
        self._failed = False

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, ended: Ended | None = None
    ) -> list[Generation]:
        """See `RolloutEngine.generate`."""
        self._check(requests, sampling)
        done: dict[int, Generation] = {}

        def keep(index: int, generation: Generation) -> Opening:
            done[index] = generation
            if ended is not None:
                ended(index, generation)
            return _known(None)

        self.converse([_known(request) for request in requests], sampling, keep)
        return [done[i] for i in range(len(requests))]

    def converse(self, openings: Sequence[Opening], sampling: SamplingParams, then: Then) -> None:
        """See `RolloutEngine.converse`. A conversation stays on its server, which has the cache of its prompt."""
        assert self._experts is not None or not sampling.routes, "a dense model has no routes"
        assert not self._memory.away, "the rollout engine sleeps; wake it before generating"
        assert not self.needs_weights, "the servers have given up their weights; publish them before generating"
        batch = _Batch(sampling, len(openings))
        pools = [ThreadPoolExecutor(self.concurrency, thread_name_prefix="sglang") for _ in self.clients]
        ended: list[Future[None]] = [Future() for _ in openings]

        def proceed(index: int, answer: Opening) -> None:
            # Nothing waits here, so that a thread is only taken by a request that runs.
            try:
                request = answer.result()
                if request is None:
                    ended[index].set_result(None)
                else:
                    pools[index % len(pools)].submit(respond, index, request)
            except BaseException as error:  # noqa: BLE001 - raised where the conversations are awaited
                ended[index].set_exception(error)

        def respond(index: int, request: Request) -> None:
            try:
                self._check([request], sampling)
                generation = self._complete(self.clients[index % len(pools)], batch, index, request)
                then(index, generation).add_done_callback(partial(proceed, index))
            except BaseException as error:  # noqa: BLE001 - raised where the conversations are awaited
                ended[index].set_exception(error)

        self._failed = True
        try:
            for index, opening in enumerate(openings):
                opening.add_done_callback(partial(proceed, index))
            for future in wait(ended, return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:
            # After an error nothing of this call runs any more.
            batch.cancelled.set()
            for pool in pools:
                pool.shutdown(cancel_futures=True)
            for what, count in batch.repeated.items():
                log.warning("SGLang server %s %d requests of this rollout; they were repeated", what, count)
        self._failed = False

    @property
    def needs_weights(self) -> bool:
        """See `ServerEngine.needs_weights`."""
        return self._memory.lacks_weights

    def weights_updated(self, version: int) -> None:
        """See `ServerEngine.weights_updated`."""
        for client in self.clients:
            check_served(client, str(version))
        self.weight_version = str(version)
        self._memory.weights_arrived()

    def use_loaded(self) -> None:
        """No weights will be sent: what servers loaded from their model folder is what they generate with."""
        self.weight_version = AS_LOADED

    def sleep(self) -> None:
        """Wait until the servers are idle, and give up weights and KV cache where that is wanted."""
        try:
            if "kv_cache" not in self._memory.away:
                # A server that is not idle does not refuse to release memory: it dies.
                patience = ENDING_SECONDS if self._failed else min(MEMORY_SECONDS, self.rollout.rollout_request_timeout)
                self._memory.flush(patience, self.backoff)
            if self.release_memory:
                self._memory.release()
        except (SglangError, ServerDied) as fault:
            if not self._failed:
                raise
            # What failed is being raised already, and this follows from it.
            log.warning("%s", fault)

    def wake_for_weights(self) -> None:
        """Take back the memory of the weights alone, so that they can be updated."""
        self._memory.resume("weights")

    def wake(self) -> None:
        """Take back everything that is away. Raises RunError: a server's weights are not those that it was sent."""
        self._memory.resume("weights", "kv_cache")

    def revive(self) -> int:
        """See `ServerEngine.revive`. Raises RunError: a server does not come up again."""
        dead = [server for server in self.servers if server.ends_within(REVIVE_SECONDS)]
        for server in dead:
            log.warning("starting SGLang server %s again; its last lines were:\n%s", server.address, server.tail())
            server.stop()
            server.start()
        if dead:
            self._memory = ServerMemory(self.clients, self._tell)
            self._memory.lacks_weights = True
        self._failed = False
        self.sleep()
        return len(dead)

    def close(self) -> None:
        """End the servers that this engine owns."""
        for server in self.servers:
            server.stop()

    def _tell(self, client: SglangClient, path: str, payload: dict[str, Any] | None, timeout: float) -> Any:
        """Have a server do something; its reply.
        Raises SglangError or ServerDied: it did not do it."""
        try:
            return client.request("POST", path, payload, timeout=timeout)
        except ConnectionFault as fault:
            self._raise_if_ended(client, ENDING_SECONDS, f"before {path}", fault)
            raise

    def _raise_if_ended(self, client: SglangClient, seconds: float, doing: str, fault: ConnectionFault) -> None:
        """Raises ServerDied: the fault is that of a server of this engine that has ended, or does so in this time."""
        server = self.servers[self.clients.index(client)] if self.servers else None
        if server is not None and server.ends_within(seconds):
            raise server.died(doing) from fault

    def check_longest(self, request: Request, sampling: SamplingParams) -> None:
        """Refuse the longest prompt before anything is generated, where the servers have no room for it.
        Raises RunError: it names the limit; the engine's own servers are ended."""
        try:
            self._check([request], sampling)
        except RunError:
            self.close()
            raise

    def _check(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        for request in requests:
            request.check(sampling, self._vocab_size, self._max_positions, self._max_prompt)

    def _complete(self, client: SglangClient, batch: _Batch, index: int, request: Request) -> Generation:
        """Ask until the response of one sample is complete."""
        # A stop string may lie across a seam, where the server would not see it.
        seamless = self.rollout.partial_rollout and not batch.sampling.stop
        most_begun = min(request.limit(batch.sampling) - 1, self._max_prompt - len(request.prompt_tokens))
        tokens: list[int] = []
        log_probs: list[float] = []
        fruitless = 0
        while fruitless < ABORT_TRIES:
            if fruitless:
                self._pause(batch, fruitless, most=ABORT_SECONDS)
            part = self._ask(client, batch, index, request, tokens)
            if part.finish_reason != "abort":
                done = Generation(
                    tokens + part.tokens, log_probs + part.log_probs, part.finish_reason, routes=part.routes
                )
                return self._cut(done, request, batch.sampling)
            batch.repeated[f"{client.address} aborted"] += 1
            fruitless += 1
            if seamless and len(tokens) + len(part.tokens) <= most_begun:
                tokens, log_probs = tokens + part.tokens, log_probs + part.log_probs
                fruitless = 0 if part.tokens else fruitless
        what = f"SGLang server {client.address} aborted sample {index} of {batch.size} {ABORT_TRIES} times"
        fix = "let nothing else abort requests on this server, or raise its memory: --sglang-mem-fraction-static"
        where, got = f"http://{client.address}/generate", f"{ABORT_TRIES} aborts"
        raise RunError(ABORTED(what, where=where, got=got, expected="a complete response", fix=fix))

    def _cut(self, done: Generation, request: Request, sampling: SamplingParams) -> Generation:
        """The response up to its first stop string. A server looks for one in as many tokens as it is usually spelt
        with, and does not see other spellings."""
        if not sampling.stop or not sampling.has_stop(done.tokens[:-1], self._decode):
            return done
        window, most = sampling.stop_window, len(done.tokens)
        counts = (n for n in range(1, most) if sampling.has_stop(done.tokens[max(0, n - window) : n], self._decode))
        count = next(counts, most)
        routes = None if done.routes is None else done.routes[: len(request.prompt_tokens) + count - 1]
        return Generation(done.tokens[:count], done.log_probs[:count], "stop", routes=routes)

    def _ask(self, client: SglangClient, batch: _Batch, index: int, request: Request, begun: list[int]) -> Part:
        """Request what follows the tokens that have `begun` a response; again where the connection broke."""
        sample, sampling = f"sample {index} of {batch.size}", batch.sampling
        tokens, limit = [*request.prompt_tokens, *begun], request.limit(sampling) - len(begun)
        attempt = 0
        while True:
            # No id may be the beginning of another one: a server aborts all that begin with it.
            rid = f"relax-{os.getpid()}-{next(self._request_numbers)}-{index}"
            try:
                reply = client.request(
                    "POST",
                    "/generate",
                    generate_payload(rid, tokens, request.seed, limit, sampling),
                    timeout=self.rollout.rollout_request_timeout,
                    cancelled=batch.cancelled.is_set,
                )
                return read_part(
                    reply,
                    sample=sample,
                    prompt=len(tokens),
                    max_new_tokens=limit,
                    sampling=sampling,
                    vocab_size=self._vocab_size,
                    version=self.weight_version,
                    experts=self._experts if sampling.routes else None,
                )
            except (CancelledFault, DeadlineFault):
                client.abort(rid, ENDING_SECONDS)
                raise
            except ConnectionFault as fault:
                attempt += 1
                is_last = attempt == CONNECTION_TRIES
                self._raise_if_ended(client, ENDING_SECONDS if is_last else 0, "while it generated", fault)
                if is_last:
                    raise
                log.info("%s: %s (%s)", sample, fault, fault.got)
                batch.repeated[f"{client.address} broke the connection of"] += 1
                # It may still be running there: its answer is not wanted any more.
                client.abort(rid, ENDING_SECONDS)
            self._pause(batch, attempt)

    def _pause(self, batch: _Batch, attempt: int, most: float = 30.0) -> None:
        batch.cancelled.wait(min(most, self.backoff * 2 ** (attempt - 1)))


def _known(request: Request | None) -> Opening:
    answer: Opening = Future()
    answer.set_result(request)
    return answer
