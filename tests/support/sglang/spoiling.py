"""What a fault does to a reply of `/generate`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi.responses import JSONResponse, Response

from tests.support.sglang.faults import Fault


def spoilt(reply: Any, fault: Fault, many: bool) -> Response:
    """The reply with what the fault does to it."""
    if fault.kind == "disconnect":
        return Hangup()
    shapes = {
        "error_message": {"error": {"message": "the request is bad"}},
        "error_string": {"error": "the request is bad"},
        "error_object": {"object": "error", "message": "the request is bad", "type": "400", "code": 400},
    }
    if fault.kind in shapes:
        return JSONResponse(shapes[fault.kind], fault.status)
    if fault.kind == "not_json":
        return Response(b'{"text": ', media_type="application/json")
    for answer in reply if many else [reply]:
        _spoil(answer, answer["meta_info"], fault.kind)
    if fault.kind == "cut":
        data = json.dumps(reply).encode()
        return Hangup(data[: len(data) // 2], len(data))
    return JSONResponse(reply)


def _spoil(answer: dict[str, Any], meta: dict[str, Any], kind: str) -> None:
    triples = meta["output_token_logprobs"]
    if kind == "stale":
        meta["weight_version"] = "0-before"
    elif kind == "mixed":
        meta["weight_versions"] = [
            {"version": "0-before", "start": 0, "end": 1},
            {"version": meta["weight_version"], "start": 1, "end": len(triples)},
        ]
    elif kind == "missing_log_prob":
        triples.pop()
    elif kind == "null_log_prob":
        triples[-1][0] = None
    elif kind == "positive_log_prob":
        triples[-1][0] = 0.4
    elif kind == "long_log_prob":
        triples[-1][0] = -(10**400)
    elif kind == "not_a_number":
        meta["finish_reason"] = {"type": "stop", "matched": "NaN happened"}
    elif kind == "other_prompt":
        meta["prompt_tokens"] += 1
    elif kind == "past_stop":
        answer["output_ids"] = [8, 9]
        meta["output_token_logprobs"] = [[-1.0, 8, None], [-1.0, 9, None]]
    elif kind == "other_tokens":
        triples[0][1] += 1
    elif kind == "foreign_token":
        answer["output_ids"][0] = triples[0][1] = 1 << 20
    elif kind == "empty":
        answer["output_ids"], meta["output_token_logprobs"] = [], []
    elif kind == "too_long":
        answer["output_ids"] += answer["output_ids"] * 50
        meta["output_token_logprobs"] += triples * 50
    elif kind == "no_reason":
        meta["finish_reason"] = None


class Hangup(Response):
    """Closes the connection, after `sent` bytes of a reply."""

    def __init__(self, sent: bytes = b"", size: int = 0) -> None:
        super().__init__()
        self.sent, self.size = sent, size

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        if self.sent:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(self.size).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": self.sent, "more_body": True})
            await asyncio.sleep(0.05)
        scope["hang_up"]()
