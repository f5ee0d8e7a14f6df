"""`--rm-type remote --rm-url URL`: a server judges the samples, over HTTP."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from relax_cli.config.redact import scrubbed
from relax_cli.config.text import shortened
from relax_cli.data.rewards.types import JudgesAhead, RewardInput, Score
from relax_cli.data.values import sendable
from relax_cli.errors import RunError, problem_kind

Result = TypeVar("Result")
BUSY = 429
BLOCK = 1 << 16
MOST_BYTES = 256 << 20
"""A longer answer is not a list of rewards."""
REWARD_REMOTE = problem_kind(
    "reward-remote",
    "Reward",
    "The server of `--rm-url` did not answer, or not in the [agreed form](rewards.md#a-server-that-judges).\n"
    "Connection faults, HTTP 429 and 5xx are tried again, at most 5 times and for 10 minutes in all; other answers"
    " are not.",
    option="--rm-url",
)


class RemoteReward(JudgesAhead):
    """POSTs `{"samples": [{"prompt", "response", "label", "metadata"}, …]}` and reads `{"rewards": [REWARD, …]}`.

    A REWARD is a number, or an object of named numbers, which mean what they mean in a reward function.
    """

    attempts = 5
    """How often a batch is sent, where the connection fails or the server answers 429 or 5xx."""
    deadline = 600.0
    """Seconds for a batch, all attempts together."""
    pause = 1.0
    """Seconds before the second attempt; doubled before each further one."""
    sleep = staticmethod(time.sleep)

    def __init__(self, url: str) -> None:
        """`url` is http or https; `USER:PASSWORD@` in it becomes basic authorisation."""
        self.shown_url = scrubbed(url)
        self._url, self._headers = _endpoint(url)
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._lock = threading.Lock()
        self._asking: Future[None] | None = None
        """The thread that judges ahead; kept where it failed."""
        self._ended: list[RewardInput] = []
        self._judged: dict[int, tuple[RewardInput, Score]] = {}
        """By `id`, which belongs to the sample as long as it is kept."""

    def __call__(self, samples: Sequence[RewardInput]) -> list[Score]:
        """Judge a batch.
        Raises RunError: no answer came in time, the server refused, or the answer is not of the form above."""
        try:
            if (asking := self._asking) is not None:
                asking.result()
            self._judge([sample for sample in samples if id(sample) not in self._judged])
            return [self._judged[id(sample)][1] for sample in samples]
        finally:
            with self._lock:
                self._asking = None
                self._ended, self._judged = [], {}

    def ahead(self, _: RewardInput, group: Sequence[RewardInput]) -> None:
        """Send whole prompts while others are generated, in one request at a time."""
        with self._lock:
            self._ended += group
            if self._ended and self._asking is None:
                self._asking = _started(self._judge_ended)

    def _judge_ended(self) -> None:
        while True:
            with self._lock:
                samples, self._ended = self._ended, []
                if not samples:
                    self._asking = None
                    return
            self._judge(samples)

    def _judge(self, samples: Sequence[RewardInput]) -> None:
        if not samples:
            return
        # Metadata of files are plain JSON; those of reasoning-gym may contain its own objects.
        rows = [
            {"prompt": s.prompt, "response": s.response, "label": s.label, "metadata": sendable(s.metadata)}
            for s in samples
        ]
        answer = self._ask(json.dumps({"samples": rows}, allow_nan=False).encode())
        try:
            found = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise self._error("answered something that is not JSON", _start(answer)) from error
        rewards = found.get("rewards") if isinstance(found, dict) else None
        if not isinstance(rewards, list):
            raise self._error("answered JSON without a list of rewards", _start(answer))
        if len(rewards) != len(samples):
            raise self._error("answered another number of rewards than samples", len(rewards), str(len(samples)))
        self._judged.update({id(sample): (sample, score) for sample, score in zip(samples, rewards, strict=True)})

    def _ask(self, body: bytes) -> bytes:
        end = time.monotonic() + self.deadline
        pause = self.pause
        for attempt in range(1, self.attempts + 1):
            try:
                if (left := end - time.monotonic()) <= 0:
                    raise TimeoutError
                # The time limit of a socket is for each read, and a server may send a byte now and then. A thread that
                # is late is left behind, for the run ends.
                return _started(partial(self._post, body, left)).result(left)
            except TimeoutError as error:
                raise self._error("did not answer in time", f"no answer in {self.deadline:g} s") from error
            except _Refused as refusal:
                final = not refusal.is_passing or time.monotonic() + pause >= end
                if final or attempt == self.attempts:
                    tries = f"{refusal}, after {attempt} attempts" if attempt > 1 else str(refusal)
                    raise self._error("failed", tries) from refusal
            self.sleep(pause)
            pause *= 2
        raise AssertionError("the last attempt returns or raises")

    def _post(self, body: bytes, seconds: float) -> bytes:
        """One attempt. Raises TimeoutError where a part of the exchange took that long, `_Refused` for all else."""
        request = urllib.request.Request(self._url, data=body, headers=self._headers, method="POST")
        try:
            with self._opener.open(request, timeout=seconds) as response:
                return _read(response)
        except urllib.error.HTTPError as error:
            said = ""
            with error, suppress(OSError, http.client.HTTPException):
                said = _start(error.read(BLOCK))
            status = f"HTTP {error.code} {error.reason}"
            raise _Refused(f"{status}: {said}" if said else status, error.code == BUSY or error.code >= 500) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise TimeoutError from error
            said = str(reason) if reason is not error else f"{type(error).__name__}: {error}".removesuffix(": ")
            raise _Refused(said, not isinstance(reason, ssl.SSLCertVerificationError)) from error

    def _error(self, what: str, got: object, expected: str = "") -> RunError:
        return RunError(
            REWARD_REMOTE(
                f"the reward server {what}",
                where=self.shown_url,
                got=scrubbed(str(got)),
                expected=expected or 'HTTP 200 and {"rewards": [a number or an object for each sample]}',
                fix="look at the server's log; one sample by hand: curl -H 'Content-Type: application/json' "
                """-d '{"samples": [{"prompt": "1+1=", "response": "2", "label": "2", "metadata": {}}]}' """
                f"'{self.shown_url}'",
            )
        )


class _Refused(Exception):
    """An attempt failed; `is_passing`: the same request may succeed later."""

    def __init__(self, text: str, is_passing: bool) -> None:
        super().__init__(text)
        self.is_passing = is_passing


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would arrive as a GET, and its password at another host: the answer stays an error."""

    def redirect_request(self, *_: Any) -> None: ...


def _endpoint(url: str) -> tuple[str, dict[str, str]]:
    """The URL without its user and password, and the headers that carry them."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if at:
        secret = base64.b64encode(unquote(user).encode()).decode()
        headers["Authorization"] = f"Basic {secret}"
    return urlunsplit(parts._replace(netloc=host, fragment="")), headers


def _started(work: Callable[[], Result]) -> Future[Result]:
    """The result of a thread that ends with this process."""
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name="reward-server").start()
    return result


def _read(response: http.client.HTTPResponse) -> bytes:
    body = response.read(MOST_BYTES + 1)
    if len(body) > MOST_BYTES:
        raise http.client.HTTPException(f"more than {MOST_BYTES} bytes")
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return body


def _start(body: bytes, most: int = 200) -> str:
    """The beginning of an answer, on one line."""
    return shortened(body[: 4 * most].decode("utf-8", "replace"), most)
