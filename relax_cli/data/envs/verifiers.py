"""Environments of the `verifiers` package (the extra `verifiers`), turn by turn.

A verifiers environment asks a client for each response. Here the client hands the question to relax and waits: a
rollout of the environment runs until it asks, its question becomes an observation, and the response is the answer.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from relax_cli.data.envs.load import EnvRow, Observation
from relax_cli.data.rows import TOOLS, Messages

ROW = "verifiers"
"""The key of a row's metadata under which verifiers' own row is."""
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def verifiers_env(environment: Any) -> Callable[[], VerifiersEpisode]:
    """What `--env FILE.py:NAME` takes, from an environment such as `verifiers.load_environment("reverse-text")`.

    A model calls its tools as Hermes and Qwen do: `<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>`.
    """
    return lambda: VerifiersEpisode(environment)


def write_rows(environment: Any, path: Path, count: int = -1) -> None:
    """Write `count` rows of an environment (-1: all) as `--prompt-data`, with its tools for the chat template."""
    functions = [{"type": "function", "function": t.model_dump(exclude_none=True)} for t in environment.tool_defs or ()]
    with path.open("w", encoding="utf-8") as file:
        for row in environment.get_dataset(n=count):
            line = {"input": row["prompt"], "label": str(row.get("answer", "")), "metadata": {ROW: row}}
            if functions:
                line[TOOLS] = functions
            file.write(json.dumps(line, default=str, ensure_ascii=False) + "\n")


class VerifiersEpisode:
    """One rollout of a verifiers environment."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._seen: Messages = []

    async def reset(self, row: EnvRow) -> Observation:
        """Start the rollout of a row of `write_rows`."""
        self._client = _client_class()()
        self._rollout = asyncio.create_task(self._run(row.metadata[ROW]))
        asked = await self._asked()
        if asked is None:
            raise ValueError("the environment ended before it asked for a response")
        return asked

    async def step(self, response: str) -> tuple[Observation, float, bool]:
        """Answer the environment; its rubric judges the whole rollout, so the reward comes in the end."""
        self._client.answers.put_nowait(response)
        self._seen.append({"role": "assistant", "content": response})
        asked = await self._asked()
        return ("", self._rollout.result(), True) if asked is None else (asked, 0.0, False)

    async def close(self) -> None:
        """End a rollout that a limit has cut."""
        self._rollout.cancel()

    async def _run(self, row: dict[str, Any]) -> float:
        state = await self._environment.rollout(row, self._client, "relax", {})
        if state["error"] is not None:
            raise state["error"]
        await self._environment.rubric.score_rollout(state)
        return float(state["reward"])

    async def _asked(self) -> Messages | None:
        """Messages that are new to the model; None where the rollout is over."""
        question = asyncio.ensure_future(self._client.questions.get())
        await asyncio.wait({question, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if not question.done():
            question.cancel()
            return None
        asked = [_plain(message) for message in question.result()]
        before, self._seen = self._seen, asked
        if [m["content"] for m in asked[: len(before)]] != [m["content"] for m in before]:
            raise ValueError("the environment changed earlier messages, which an episode cannot do")
        return asked[len(before) :]


@cache
def _client_class() -> type[Any]:
    """A client of verifiers that asks relax."""
    # Here, because the extra is not everywhere, and the documentation is made from all modules.
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    class AsksRelax(Client):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(None)
            self.questions: asyncio.Queue[list[Any]] = asyncio.Queue()
            self.answers: asyncio.Queue[str] = asyncio.Queue()

        async def get_response(self, prompt: list[Any], model: str, *_: Any, **__: Any) -> Any:
            self.questions.put_nowait(list(prompt))
            text = await self.answers.get()
            calls = _tool_calls(text) or None
            ends = "tool_calls" if calls else "stop"
            message = ResponseMessage(content=text, finish_reason=ends, is_truncated=False, tool_calls=calls)
            return Response(id="relax", created=0, model=model, message=message)

    # What its base asks for belongs to servers, to which only its own `get_response` would talk.
    AsksRelax.__abstractmethods__ = frozenset()
    return AsksRelax


def _tool_calls(response: str) -> list[dict[str, str]]:
    """The calls of a response; of one that cannot be read, the environment tells the model why."""
    found = []
    for number, text in enumerate(CALL.findall(response)):
        name, arguments = "", text
        with suppress(ValueError, TypeError, KeyError):
            call = json.loads(text)
            name, arguments = str(call["name"]), json.dumps(call["arguments"])
        found.append({"id": f"call_{number}", "name": name, "arguments": arguments})
    return found


def _plain(message: Any) -> dict[str, Any]:
    given = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    content = given["content"]
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    return {"role": given["role"], "content": content}
