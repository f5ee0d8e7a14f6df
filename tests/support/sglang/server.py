"""A server that speaks the HTTP protocol of SGLang 0.5.22 and 0.5.23, as recorded, over a tiny real model.

It is as strict, and as lenient, as a real 0.5.23 on a CPU was: ids outside the vocabulary, memory released while busy
and weights of other shapes kill it; lengths, settings, paths and groups it cannot take are 400; unknown and missing
names of weights are 200. `python tests/sglang/server.py --model-path DIR --port N` runs it as a process;
`running_server` runs it in a thread. Faults are ordered by `Faults` or by POST /_faults.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from relax_cli.backends.rollout.protocol import Generation
from relax_cli.backends.rollout.sglang.server import NO_CRASH_DUMPS
from tests.support.sglang.faults import Fault, Faults, from_json
from tests.support.sglang.receiver import WeightReceiver
from tests.support.sglang.serving import OtherShape, ServedModel
from tests.support.sglang.spoiling import spoilt

SAMPLING_KEYS = frozenset(
    re.findall(
        r"\w+",
        "max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty "
        "presence_penalty repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos "
        "skip_special_tokens spaces_between_special_tokens no_stop_trim stream_interval logit_bias sampling_seed "
        "custom_params beam_width watermark choice",
    )
)


POOL = 16384
"""Tokens in the KV cache, unless a fault says otherwise."""
HEALTH_SECONDS = 20.0
DUMP_SECONDS = 5.0


class Crashed(BaseException):
    """The server is dead: it answers nothing any more, not even 500."""


class ContractServer:
    """State and routes of one server."""

    def __init__(
        self,
        folder: Path,
        faults: Faults,
        *,
        tp: int = 1,
        backup: bool = True,
        in_process: bool = True,
        routes: bool = False,
    ):
        self.model = ServedModel(folder)
        self.routes = routes
        self.folder = self.tokenizer = folder
        self.faults = faults
        self.receiver = WeightReceiver(tp)
        self.backup = backup
        self.in_process = in_process
        self.version = "default"
        self.going_on = asyncio.Event()
        self.going_on.set()
        self.session_open = False
        self.away: set[str] = set()
        self.running: dict[str, asyncio.Event] = {}
        self.dead = False
        self.started = time.monotonic()
        self.requests: list[tuple[str, dict[str, Any]]] = []
        """Every request: path and body."""
        self.app = FastAPI()
        for path, methods, route in self._routes():
            self.app.add_api_route(path, route, methods=methods)

    def _routes(self) -> list[tuple[str, list[str], Callable[..., Any]]]:
        both = ["GET", "POST"]
        return [
            ("/generate", ["POST"], self.generate),
            ("/health", ["GET"], self.health),
            ("/health_generate", ["GET"], self.health),
            ("/model_info", ["GET"], self.model_info),
            ("/server_info", ["GET"], self.server_info),
            ("/flush_cache", both, self.flush_cache),
            ("/abort_request", ["POST"], self.abort_request),
            ("/pause_generation", ["POST"], self.pause_generation),
            ("/continue_generation", ["POST"], self.continue_generation),
            ("/begin_weight_update", ["POST"], self.begin_weight_update),
            ("/end_weight_update", ["POST"], self.end_weight_update),
            ("/update_weights_from_tensor", ["POST"], self.update_from_tensor),
            ("/init_weights_update_group", ["POST"], self.init_group),
            ("/destroy_weights_update_group", ["POST"], self.destroy_group),
            ("/update_weights_from_distributed", ["POST"], self.update_from_distributed),
            ("/update_weights_from_disk", ["POST"], self.update_from_disk),
            ("/release_memory_occupation", both, self.release_memory),
            ("/resume_memory_occupation", both, self.resume_memory),
            ("/weights_checker", both, self.check_weights),
            ("/_faults", ["POST"], self.set_faults),
        ]

    # Generation

    async def generate(self, request: Request) -> Response:
        body = await self._body(request)
        items = body.get("input_ids")
        if not isinstance(items, list) or not items:
            return _error("input_ids should be a list")
        many = isinstance(items[0], list)
        params = body.get("sampling_params") or {}
        unknown = sorted(set(params) - SAMPLING_KEYS)
        if unknown:
            return JSONResponse({"error": f"unknown field `{unknown[0]}`"}, 400)
        rids = body["rid"] if isinstance(body.get("rid"), list) else [body.get("rid") or os.urandom(8).hex()]
        if len(rids) < len(items) and many:
            rids = [f"{rids[0]}_{i}" for i in range(len(items))]
        if any(rid in self.running for rid in rids):
            return _error(f"Duplicate request ID detected: {rids[0]}")
        prompts = items if many else [items]
        if refused := [why for prompt in prompts if (why := self.refusal(prompt, params))]:
            return _error(refused[0])
        await self.going_on.wait()
        # One fault for the whole HTTP request.
        fault = self.faults.next()
        answers = await asyncio.gather(*(self._one(r, p, params, fault) for r, p in zip(rids, prompts, strict=True)))
        if self.routes and body.get("return_routed_experts"):
            for prompt, answer in zip(prompts, answers, strict=True):
                sequence = [*prompt, *answer["output_ids"]]
                answer["meta_info"]["routed_experts"] = await asyncio.to_thread(self.model.routes, sequence)
        return spoilt(answers if many else answers[0], fault, many)

    @property
    def room(self) -> int:
        """Most tokens of a prompt and its response: two fewer than the smaller of context and KV cache."""
        return min(self.model.spec.max_positions, self.faults.pool or POOL) - 2

    def refusal(self, prompt: list[int], params: dict[str, Any]) -> str:
        """Why a request is a 400; empty where it is taken."""
        context, count, new = self.model.spec.max_positions, len(prompt), params.get("max_new_tokens", 128)
        seed = params.get("sampling_seed") or 0
        if params.get("top_k", -1) == 0:
            return "top_k must be -1 (disable) or at least 1, got 0."
        if not -(2**63) <= seed < 2**63:
            return f"sampling_seed must be in [-2**63, 2**63 - 1], got {seed}."
        if count > context:
            return f"The input ({count} tokens) is longer than the model's context length ({context} tokens)."
        if count + new > context:
            return f"Requested token count exceeds the model's maximum context length of {context} tokens."
        if count >= self.room - 4:
            return f"Input length ({count} tokens) exceeds the maximum allowed length ({self.room - 4} tokens)."
        return ""

    async def _one(self, rid: str, prompt: list[int], params: dict[str, Any], fault: Fault) -> dict[str, Any]:
        spec = self.model.spec
        # What does not fit is cut in silence.
        new = min(params.get("max_new_tokens", 128), self.room - len(prompt))
        if self.away or min(prompt) < 0 or max(prompt) >= spec.vocab_size or fault.kind == "crash":
            self.crash()
        aborted = self.running[rid] = asyncio.Event()
        version = self.version
        try:
            result = Generation([], [], "length")
            if new:
                result = await asyncio.wrap_future(self.model.submit(tuple(prompt), {**params, "max_new_tokens": new}))
            tokens = result.tokens
            triples = [[p, t, None] for p, t in zip(result.log_probs, tokens, strict=True)]
            reason: dict[str, Any] = {"type": "length", "length": len(tokens)}
            if result.finish_reason == "stop":
                reason = {"type": "stop", "matched": tokens[-1]}
            if fault.kind == "slow":
                await asyncio.wait({asyncio.create_task(aborted.wait())}, timeout=fault.seconds)
            if fault.kind == "abort" or aborted.is_set():
                # As on the real server, an aborted reply may be complete, its stop token included.
                kept = min(fault.tokens, len(tokens))
                tokens, triples = tokens[:kept], triples[:kept]
                reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        finally:
            del self.running[rid]
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": reason,
            "weight_version": version,
            "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
            "completion_tokens": len(tokens),
            "output_token_logprobs": triples,
        }
        if reason["type"] == "abort" and not tokens:  # it had not left the queue
            meta["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}
        else:
            meta |= {"prompt_tokens": len(prompt), "num_retractions": 0, "cached_tokens": 0}
        return {"text": "", "output_ids": list(tokens), "meta_info": meta}

    async def abort_request(self, request: Request) -> Response:
        body = await self._body(request)
        for rid, aborted in self.running.items():
            if body.get("abort_all") or rid.startswith(body.get("rid") or "\0"):
                aborted.set()
        return Response()

    async def pause_generation(self, request: Request) -> Response:
        body = await self._body(request)
        self.going_on.clear()
        if body.get("mode", "abort") == "abort":
            for aborted in self.running.values():
                aborted.set()
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: Request) -> Response:
        await self._body(request)
        self.going_on.set()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    # What the server says of itself

    async def health(self, request: Request) -> Response:
        await self._body(request)
        if time.monotonic() - self.started < self.faults.starting:
            return Response(status_code=503)
        if "weights" in self.away or "kv_cache" in self.away:
            self.crash()
        try:
            await asyncio.wait_for(self.going_on.wait(), HEALTH_SECONDS)
        except TimeoutError:
            return Response(status_code=503)
        return Response()

    async def model_info(self, request: Request) -> Response:
        await self._body(request)
        return JSONResponse(
            {
                "model_path": str(self.folder),
                "served_model_name": str(self.folder),
                "tokenizer_path": str(self.tokenizer),
                "is_generation": True,
                "weight_version": self.version,
                "model_type": self.model.spec.family,
            }
        )

    async def server_info(self, request: Request) -> Response:
        await self._body(request)
        said = {"version": "contract", "tp_size": self.receiver.tp, "model_path": str(self.folder)}
        limits = {"max_total_num_tokens": self.faults.pool or POOL, "max_req_input_len": self.room - 4}
        return JSONResponse({**said, "context_length": None, "enable_return_routed_experts": self.routes, **limits})

    async def flush_cache(self, request: Request) -> Response:
        await self._body(request)
        if self.running or self.faults.count_down("busy_flushes"):
            return PlainTextResponse("Flush cache failed.\n", 400)
        return PlainTextResponse("Cache flushed.\n")

    # Weights

    async def begin_weight_update(self, request: Request) -> Response:
        await self._body(request)
        if self.faults.older:
            return JSONResponse({"detail": "Not Found"}, 404)
        if not await request.body():
            return _error("1 validation error: {'type': 'missing', 'loc': ('body',), 'msg': 'Field required'}")
        if self.faults.count_down("refused_begins"):
            return _done(False, "begin was refused")
        if self.session_open:
            return _done(False, "a weight-update session is already open; call end_weight_update() first")
        self.session_open = True
        return _done(True, "Success")

    async def end_weight_update(self, request: Request) -> Response:
        await self._body(request)
        if self.faults.older:
            return JSONResponse({"detail": "Not Found"}, 404)
        if not self.session_open:
            return _done(False, "no weight-update session is open; call begin_weight_update() first")
        self.session_open = False
        return _done(True, "Success")

    async def update_from_tensor(self, request: Request) -> Response:
        body = await self._body(request)
        sent = body["serialized_named_tensors"]
        if not isinstance(sent, list):
            return _error("serialized_named_tensors should be a list")

        def take() -> None:
            self.model.update(self.receiver.apply_tensors(sent, body.get("load_format")))

        return await self._update("update_weights_from_tensor", body, take)

    async def init_group(self, request: Request) -> Response:
        body = await self._body(request)
        await asyncio.to_thread(self.receiver.init_group, body)
        return _done(True, "Succeeded to initialize custom process group.")

    async def destroy_group(self, request: Request) -> Response:
        body = await self._body(request)
        if body["group_name"] not in self.receiver.groups:
            return _done(False, "The group to be destroyed does not exist.")
        await asyncio.to_thread(self.receiver.destroy_group, body)
        return _done(True, "Succeeded to destroy custom process group.")

    async def update_from_distributed(self, request: Request) -> Response:
        body = await self._body(request)
        if body["group_name"] not in self.receiver.groups:
            return _done(False, f"Failed to receive weights: Group {body['group_name']} not in [].")
        return await self._update(
            "update_weights_from_distributed", body, lambda: self.model.update(self.receiver.receive(body))
        )

    async def update_from_disk(self, request: Request) -> Response:
        body = await self._body(request)
        if not Path(body["model_path"]).is_dir():
            return _done(False, "Failed to get weights iterator: [Errno -2] Name or service not known.")
        done = await self._update(None, body, lambda: self.model.replace(Path(body["model_path"])))
        self.folder = Path(body["model_path"])
        return done

    async def _update(self, needs_session: str | None, body: dict[str, Any], take: Callable[[], None]) -> Response:
        if needs_session and not self.session_open and not self.faults.older:
            return _done(False, f"{needs_session} must run between begin_weight_update() and end_weight_update()")
        if "weights" in self.away:
            self.crash()
        while self.running:
            await asyncio.sleep(0.01)
        try:
            await asyncio.to_thread(take)
        except OtherShape as error:
            if needs_session != "update_weights_from_distributed":
                self.crash()
            return _done(False, f"Failed to update parameter online: {error}")
        await asyncio.to_thread(self.model.apply)
        if body.get("weight_version") is not None and not self.faults.count_down("ignored_updates"):
            self.version = body["weight_version"]
        return _done(True, "Success")

    # Memory

    async def release_memory(self, request: Request) -> Any:
        tags = set((await self._body(request)).get("tags") or ("kv_cache", "weights", "cuda_graph"))
        if self.running:
            self.crash()
        self.away |= tags
        if "weights" in tags and not self.backup:
            await asyncio.to_thread(self.model.lose)

    async def resume_memory(self, request: Request) -> Any:
        tags = set((await self._body(request)).get("tags") or ("kv_cache", "weights", "cuda_graph"))
        if tags - self.away:
            self.crash()
        self.away -= tags

    async def check_weights(self, request: Request) -> Response:
        action = (await self._body(request)).get("action", "checksum")
        if self.faults.older:
            return JSONResponse({"detail": "Not Found"}, 404)
        if "weights" in self.away:
            self.crash()  # it reads memory that is not there
        if action != "checksum":
            return _done(False, f"Unsupported action={action!r}")
        sums = self.model.checksums()
        whole = hashlib.sha256("".join(sums.values()).encode()).hexdigest()
        if self.faults.count_down("changed_weights"):
            whole = "0" * 64
        rank = {"checksums": sums, "per_gpu_checksum": whole, "parallelism_info": {"role": "target", "tp_rank": 0}}
        said = {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": whole}
        return JSONResponse(said)

    # The end of it

    def crash(self) -> None:
        """Die as the real server does when its scheduler fails an assertion."""
        print("Scheduler hit an exception: AssertionError", file=sys.stderr, flush=True)
        if not self.in_process:
            # The port stays open, and nothing answers.
            time.sleep(0.0 if NO_CRASH_DUMPS.items() <= os.environ.items() else DUMP_SECONDS)
            os.kill(os.getpid(), signal.SIGKILL)
        self.dead = True
        raise Crashed

    async def set_faults(self, request: Request) -> Response:
        self.faults = from_json(await request.json())
        return Response()

    async def _body(self, request: Request) -> dict[str, Any]:
        raw = await request.body()
        body: dict[str, Any] = json.loads(raw) if raw else {}
        self.requests.append((request.url.path, body))
        return body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI: a dead server closes every connection, and a `Hangup` its own."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope["hang_up"] = send.__self__.transport.abort
        if self.dead:
            scope["hang_up"]()
            return
        try:
            await self.app(scope, receive, send)
        except Crashed:
            scope["hang_up"]()


def _error(message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, 400)


def _done(success: bool, message: str) -> Response:
    return JSONResponse({"success": success, "message": message}, 200 if success else 400)


@contextmanager
def running_server(folder: Path, faults: Faults | None = None, **options: Any) -> Iterator[tuple[ContractServer, str]]:
    """A server in a thread of this process, and its address."""
    contract = ContractServer(folder, faults or Faults(), **options)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(contract, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield contract, f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


def main() -> None:
    """Run as a process; options that only the real server has are taken and ignored."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--device", choices=["cpu"])
    parser.add_argument("--enable-weights-cpu-backup", action="store_true")
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    known, _ = parser.parse_known_args()
    faults = from_json(json.loads(os.environ.get("CONTRACT_FAULTS", "{}")))
    contract = ContractServer(
        known.model_path,
        faults,
        tp=known.tp_size,
        backup=known.enable_weights_cpu_backup,
        in_process=False,
        routes=known.enable_return_routed_experts,
    )
    print("The server is fired up and ready to roll!", flush=True)
    uvicorn.run(contract, host=known.host, port=known.port, log_level="info", lifespan="off")


if __name__ == "__main__":
    main()
