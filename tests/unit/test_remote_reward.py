"""A reward server: what is sent, what is accepted, what is tried again, and what is never shown."""

from __future__ import annotations

import base64
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from relax_cli.config.schema import RewardSection
from relax_cli.data.rewards import RewardInput, RewardResult, load_reward
from relax_cli.data.rewards.remote import RemoteReward
from relax_cli.errors import ConfigError, Problem, RunError

Answer = tuple[int, bytes]
SAMPLES = [
    RewardInput("1+1=", "2", "2", {"level": 3}, truncated=False, group=0),
    RewardInput("2+2=", "5", None, {}, truncated=True, group=1),
]


def answer(rewards: Any) -> Answer:
    return 200, json.dumps({"rewards": rewards}).encode()


class Server(ThreadingHTTPServer):
    """Gives its answers in turn, the last one for ever, and keeps what it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[Answer | Callable[[Handler], None]] = []
        self.seen: list[tuple[str, dict[str, str], Any]] = []

    def url(self, user: str = "", query: str = "") -> str:
        return f"http://{user}127.0.0.1:{self.server_port}/judge{query}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.path, dict(self.headers), json.loads(body)))
        found = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        if not isinstance(found, tuple):
            found(self)
            return
        status, body = found
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status in (302, 307):
            self.send_header("Location", self.server.url())
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Not on the screen."""


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def quick(url: str, **changes: Any) -> RemoteReward:
    reward = RemoteReward(url)
    for name, value in {"attempts": 3, "pause": 0.0, "deadline": 60.0, **changes}.items():
        setattr(reward, name, value)
    return reward


def refused(reward: Any) -> Problem:
    with pytest.raises(RunError) as caught:
        reward(SAMPLES)
    (problem,) = caught.value.problems
    return problem


def test_samples_are_posted_as_json_and_rewards_keep_the_order(server: Server) -> None:
    server.answers = [answer([1, 0.25])]
    reward = load_reward(RewardSection(rm_type="remote", rm_url=server.url()), {})
    assert reward(SAMPLES) == [RewardResult(1.0), RewardResult(0.25)]
    reward.close()
    ((path, headers, body),) = server.seen
    assert path == "/judge"
    assert headers["Content-Type"] == "application/json"
    assert "Authorization" not in headers
    assert body == {
        "samples": [
            {"prompt": "1+1=", "response": "2", "label": "2", "metadata": {"level": 3}},
            {"prompt": "2+2=", "response": "5", "label": None, "metadata": {}},
        ]
    }


PROMPTS = [RewardInput(f"{i // 2}", str(i), None, {}, truncated=False, group=i // 2) for i in range(6)]
"""Two responses to each of three prompts."""


def judge_by_number(handler: Handler) -> None:
    _, _, sent = handler.server.seen[-1]
    body = answer([float(sample["response"]) for sample in sent["samples"]])[1]
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def test_whole_prompts_are_sent_while_others_are_generated(server: Server) -> None:
    server.answers = [judge_by_number]
    reward = load_reward(RewardSection(rm_type="remote", rm_url=server.url()), {})
    reward.ahead(PROMPTS[0], ())
    reward.ahead(PROMPTS[5], ())
    reward.ahead(PROMPTS[1], PROMPTS[:2])
    end = time.monotonic() + 60
    while not server.seen and time.monotonic() < end:
        time.sleep(0.01)
    assert [result.reward for result in reward(PROMPTS)] == [0, 1, 2, 3, 4, 5]
    sent = [[sample["response"] for sample in body["samples"]] for _, _, body in server.seen]
    assert sent == [["0", "1"], ["2", "3", "4", "5"]]
    assert [result.reward for result in reward(PROMPTS)] == [0, 1, 2, 3, 4, 5], "nothing is left of the batch before"
    assert len(server.seen) == 3


def test_a_refusal_ahead_of_the_batch_is_that_of_the_batch(server: Server) -> None:
    server.answers = [(400, b"no such model"), judge_by_number]
    reward = quick(server.url())
    reward.ahead(PROMPTS[1], PROMPTS[:2])
    with pytest.raises(RunError) as caught:
        reward(PROMPTS)
    assert caught.value.problems[0].got.startswith("HTTP 400")
    assert reward(PROMPTS) == [0, 1, 2, 3, 4, 5]
    assert len(server.seen) == 2


def test_an_object_is_a_reward_with_parts_or_parts_to_pick_from(server: Server) -> None:
    server.answers = [answer([{"reward": 1, "form": 0.5}, {"reward": 0, "form": 1}])]
    section = RewardSection(rm_type="remote", rm_url=server.url())
    assert load_reward(section, {})(SAMPLES) == [RewardResult(1.0, {"form": 0.5}), RewardResult(0.0, {"form": 1.0})]
    by_form = section.model_copy(update={"reward_key": "form"})
    assert [r.reward for r in load_reward(by_form, {})(SAMPLES)] == [0.5, 1.0]
    server.answers = [answer([{"form": 0.5, "right": 1}] * 2)]
    assert [r.reward for r in load_reward(by_form, {})(SAMPLES)] == [0.5, 0.5]
    assert refused(load_reward(section, {})).fix == "--reward-key form"


@pytest.mark.parametrize(
    "value",
    ["NaN", "Infinity", '"1.0"', "null", "1" + "0" * 400, "1e400", '{"reward": NaN}', '{"reward": 1, "x": "y"}'],
)
def test_a_reward_that_is_not_finite_names_sample_and_url(server: Server, value: str) -> None:
    server.answers = [(200, b'{"rewards": [1, %s]}' % value.encode())]
    problem = refused(load_reward(RewardSection(rm_type="remote", rm_url=server.url()), {}))
    assert problem.id == "reward-failed"
    assert server.url() in problem.message
    assert "group 1" in problem.where
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("found", "message", "got"),
    [
        (answer([1.0]), "another number of rewards", "1"),
        (answer([1.0] * 3), "another number of rewards", "3"),
        ((200, b"<html>busy</html>"), "not JSON", "<html>busy</html>"),
        ((200, b"\xff\xfe\x00"), "not JSON", "\ufffd"),
        ((200, b""), "not JSON", ""),
        ((200, b"[" * 100_000), "not JSON", "[[["),
        ((200, b'{"rewards": [1%s, 1]}' % (b"0" * 5000)), "not JSON", '{"rewards": [1000'),
        ((200, b"[1.0, 2.0]"), "without a list of rewards", "[1.0, 2.0]"),
        ((200, b'{"rewards": 1}'), "without a list of rewards", '{"rewards": 1}'),
        ((404, b"no such path"), "failed", "HTTP 404 Not Found: no such path"),
        ((401, b""), "failed", "HTTP 401 Unauthorized"),
        ((302, b""), "failed", "HTTP 302 Found"),
        ((307, b""), "failed", "HTTP 307 Temporary Redirect"),
    ],
)
def test_any_other_answer_is_refused_at_once_in_four_parts(
    server: Server, found: Answer, message: str, got: str
) -> None:
    server.answers = [found]
    problem = refused(quick(server.url()))
    assert (problem.id, problem.option, problem.where) == ("reward-remote", "--rm-url", server.url())
    assert message in problem.message
    assert problem.got.startswith(got)
    assert problem.expected
    assert server.url() in problem.fix
    assert len(server.seen) == 1


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_busy_or_broken_server_is_asked_again(server: Server, status: int) -> None:
    pauses: list[float] = []
    server.answers = [(status, b"wait"), (status, b"wait"), answer([1, 0])]
    assert quick(server.url(), pause=0.5, sleep=pauses.append)(SAMPLES) == [1, 0]
    assert pauses == [0.5, 1.0]
    assert len(server.seen) == 3


def test_a_server_that_stays_broken_is_given_up(server: Server) -> None:
    server.answers = [(503, b"overloaded")]
    problem = refused(quick(server.url()))
    assert problem.got == "HTTP 503 Service Unavailable: overloaded, after 3 attempts"
    assert len(server.seen) == 3


def cut_off(handler: Handler) -> None:
    """Promise more than is sent, then hang up."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"rewards": [1')


def test_a_broken_connection_is_tried_again(server: Server) -> None:
    server.answers = [cut_off, lambda handler: handler.connection.close(), answer([1, 0])]
    assert quick(server.url())(SAMPLES) == [1, 0]
    server.answers = [cut_off]
    assert "IncompleteRead" in refused(quick(server.url())).got


def test_nobody_listening_is_a_connection_fault(server: Server) -> None:
    url = server.url()
    server.server_close()
    problem = refused(quick(url))
    assert "refused" in problem.got
    assert problem.got.endswith("after 3 attempts")


def silent(handler: Handler) -> None:
    time.sleep(60)


def drip(handler: Handler, text: bytes) -> None:
    """Send each byte in time, all of them never."""
    with suppress(OSError):
        for byte in itertools.cycle(text):
            handler.wfile.write(bytes([byte]))
            handler.wfile.flush()
            time.sleep(0.05)


def dripping(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "10000")
    handler.end_headers()
    drip(handler, b" ")


def slow_status(handler: Handler) -> None:
    drip(handler, b"HTTP/1.1 200 OK" + b" " * 200)


def slow_headers(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    drip(handler, b"X-Wait: 1\r\n")


def slow_fault(handler: Handler) -> None:
    handler.send_response(400)
    handler.send_header("Content-Length", "10000")
    handler.end_headers()
    drip(handler, b"wrong ")


@pytest.mark.parametrize("behaviour", [silent, dripping, slow_status, slow_headers, slow_fault])
def test_the_deadline_ends_a_batch_whose_answer_does_not_come(
    server: Server, behaviour: Callable[[Handler], None]
) -> None:
    server.answers = [behaviour]
    started = time.monotonic()
    problem = refused(quick(server.url(), deadline=0.5))
    assert time.monotonic() - started < 50
    assert problem.got == "no answer in 0.5 s"
    assert len(server.seen) == 1


def test_no_attempt_is_made_that_the_deadline_would_end(server: Server) -> None:
    server.answers = [(503, b"")]
    assert refused(quick(server.url(), deadline=5.0, pause=6.0)).got.startswith("HTTP 503")
    assert len(server.seen) == 1


def test_user_and_password_are_sent_and_never_shown(server: Server) -> None:
    url = server.url("me:hun%20ter2@", "?token=s3cr3t")
    server.answers = [answer([1, 0]), (404, b"who is hun ter2?")]
    reward = load_reward(RewardSection(rm_type="remote", rm_url=url), {})
    assert [r.reward for r in reward(SAMPLES)] == [1, 0]
    path, headers, _ = server.seen[0]
    assert path == "/judge?token=s3cr3t"
    assert base64.b64decode(headers["Authorization"].removeprefix("Basic ")) == b"me:hun ter2"
    shown = repr(refused(reward))
    assert "127.0.0.1" in shown
    assert "s3cr3t" not in shown
    assert "hun%20ter2" not in shown


def test_metadata_of_any_kind_are_sent_as_strict_json(server: Server) -> None:
    server.answers = [answer([1])]
    odd = {"nan": float("nan"), "inf": float("inf"), "set": {1}, "pair": (1, 2), 3: Path("x"), "deep": [float("nan")]}
    quick(server.url())([RewardInput("p", "r", None, odd, truncated=False, group=0)])
    (row,) = server.seen[0][2]["samples"]
    assert row["metadata"] == {"nan": None, "inf": None, "set": [1], "pair": [1, 2], "3": "x", "deep": [None]}


def test_a_server_is_not_asked_about_nothing(server: Server) -> None:
    reward = load_reward(RewardSection(rm_type="remote", rm_url=server.url()), {})
    assert reward([]) == []
    assert server.seen == []


def test_remote_without_a_usable_url_does_not_load() -> None:
    for url in (None, "judge.example", "ftp://host/x"):
        with pytest.raises(ConfigError):
            load_reward(RewardSection(rm_type="remote", rm_url=url), {})


def test_the_server_of_the_page_works(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "rewards.md").read_text("utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "HTTPServer" in block)
    names: dict[str, Any] = {"__name__": "page"}
    definitions, serve = code.rsplit("\n\nHTTPServer", 1)
    assert serve.startswith('(("127.0.0.1", 8000), Judge).serve_forever()')
    exec(definitions, names)
    monkeypatch.setattr(names["Judge"], "log_message", lambda *_: None)
    server.RequestHandlerClass = names["Judge"]
    reward = load_reward(RewardSection(rm_type="remote", rm_url=server.url()), {})
    assert [r.reward for r in reward(SAMPLES)] == [1.0, 0.0]
