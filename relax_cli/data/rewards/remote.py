"""`--rm-type remote --rm-url URL`: a server judges the samples, over HTTP."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from relax_cli.config.redact import scrubbed
from relax_cli.data.rewards.types import RewardInput, RewardResult, Score
from relax_cli.errors import Problem, RunError

BUSY = 429
BLOCK = 1 << 16
MOST_BYTES = 256 << 20
"""A longer answer is no list of rewards."""


class RemoteReward:
    """POSTs `{"samples": [{"prompt", "response", "label", "metadata"}, …]}` and reads `{"rewards": [REWARD, …]}`.

    A REWARD is a number, or an object of named numbers. In an object, `reward` is the number that trains and the others
    are its parts; without it `--reward-key` picks one. What the numbers must be is checked where rewards are called.
    """

    def __init__(
        self,
        url: str,
        *,
        attempts: int = 5,
        deadline: float = 600.0,
        pause: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            url: http or https; `USER:PASSWORD@` in it becomes basic authorisation.
            attempts: how often a batch is sent, where the connection fails or the server answers 429 or 5xx.
            deadline: seconds for a batch, all attempts together.
            pause: seconds before the second attempt; doubled before each further one.
            sleep: waits for so many seconds.
        """
        self.shown_url = scrubbed(url)
        self._url, self._headers = _endpoint(url)
        self._attempts = attempts
        self._deadline = deadline
        self._pause = pause
        self._sleep = sleep
        self._opener = urllib.request.build_opener(_NoRedirect)

    def __call__(self, samples: Sequence[RewardInput]) -> list[Score]:
        """Judge a batch.

        Raises:
            RunError: no answer came in time, the server refused, or the answer is not of the form above.
        """
        rows = [{"prompt": s.prompt, "response": s.response, "label": s.label, "metadata": s.metadata} for s in samples]
        answer = self._ask(json.dumps({"samples": rows}).encode())
        try:
            found = json.loads(answer)
        except ValueError as error:
            raise self._error("answered something that is not JSON", _start(answer)) from error
        rewards = found.get("rewards") if isinstance(found, dict) else None
        if not isinstance(rewards, list):
            raise self._error("answered JSON without a list of rewards", _start(answer))
        if len(rewards) != len(samples):
            raise self._error("answered another number of rewards than samples", len(rewards), str(len(samples)))
        return [_score(reward) for reward in rewards]

    def _ask(self, body: bytes) -> bytes:
        end = time.monotonic() + self._deadline
        pause = self._pause
        for attempt in range(1, self._attempts + 1):
            try:
                return self._post(body, end)
            except TimeoutError as error:
                raise self._error("did not answer in time", f"no answer in {self._deadline:g} s") from error
            except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
                fault = self._fault(error)
                final = not _is_passing(error) or time.monotonic() + pause >= end
                if final or attempt == self._attempts:
                    tries = f"{fault}, after {attempt} attempts" if attempt > 1 else fault
                    raise self._error("failed", tries) from error
            self._sleep(pause)
            pause *= 2
        raise AssertionError("the last attempt returns or raises")

    def _post(self, body: bytes, end: float) -> bytes:
        """One attempt.

        Raises:
            TimeoutError: `end`, in monotonic seconds, has come.
            OSError: anything else; `URLError` and `HTTPError` are kinds of it.
        """
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        request = urllib.request.Request(self._url, data=body, headers=self._headers, method="POST")
        try:
            with self._opener.open(request, timeout=left) as response:
                return _read(response, end)
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise TimeoutError from error
            raise

    def _fault(self, error: Exception) -> str:
        if isinstance(error, urllib.error.HTTPError):
            with error:
                try:
                    said = _start(error.read(BLOCK))
                except (OSError, http.client.HTTPException):
                    said = ""
            return f"HTTP {error.code} {error.reason}" + (f": {said}" if said else "")
        if isinstance(error, urllib.error.URLError):
            return str(error.reason)
        return f"{type(error).__name__}: {error}".removesuffix(": ")

    def _error(self, what: str, got: object, expected: str = "") -> RunError:
        return RunError(
            Problem(
                id="reward-remote",
                message=f"the reward server {what}",
                option="--rm-url",
                where=self.shown_url,
                got=scrubbed(str(got)),
                expected=expected or 'HTTP 200 and {"rewards": [a number or an object for each sample]}',
                fix="look at the server's log; one sample by hand: curl -H 'Content-Type: application/json' "
                """-d '{"samples": [{"prompt": "1+1=", "response": "2", "label": "2", "metadata": {}}]}' """
                f"'{self.shown_url}'",
            )
        )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would arrive as a GET, and its password at another host."""

    def redirect_request(self, *_: Any) -> None:
        """Leave the answer as the error that it is."""


def _endpoint(url: str) -> tuple[str, dict[str, str]]:
    """The URL without its user and password, and the headers that carry them."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if at:
        secret = base64.b64encode(unquote(user).encode()).decode()
        headers["Authorization"] = f"Basic {secret}"
    return urlunsplit(parts._replace(netloc=host, fragment="")), headers


def _is_passing(error: Exception) -> bool:
    """Whether the same request may succeed later: no connection, a broken one, a busy or broken server."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code == BUSY or error.code >= 500
    return not isinstance(getattr(error, "reason", error), ssl.SSLCertVerificationError)


def _read(response: http.client.HTTPResponse, end: float) -> bytes:
    """The whole body. The time limit of a socket is for each block, so a slow server is stopped here."""
    blocks: list[bytes] = []
    size = 0
    while block := response.read1(BLOCK):
        blocks.append(block)
        size += len(block)
        if time.monotonic() > end:
            raise TimeoutError
        if size > MOST_BYTES:
            raise http.client.HTTPException(f"more than {MOST_BYTES} bytes")
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(blocks)


def _score(reward: Any) -> Score:
    if isinstance(reward, Mapping) and "reward" in reward:
        return RewardResult(reward["reward"], {name: part for name, part in reward.items() if name != "reward"})
    score: Score = reward
    return score


def _start(body: bytes, most: int = 200) -> str:
    """The beginning of an answer, on one line."""
    text = " ".join(body[: 4 * most].decode("utf-8", "replace").split())
    return text if len(text) <= most else text[: most - 1] + "…"
