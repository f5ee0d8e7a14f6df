"""What goes on after a server died: once, with the weights that the rollout had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relax_cli.backends.rollout.protocol import ServerDied
from relax_cli.engine.session import Ranks, Roles, Session, recorded
from relax_cli.errors import Problem, RunError

DIED = ServerDied(Problem(id="sglang-server-died", message="ended", fix="look"))


class Rollout(Ranks[Any]):
    """Writes down what it is asked, and fails as told."""

    def __init__(self, failures: list[Exception], needs_weights: bool = False) -> None:
        super().__init__("rollout")
        self.failures = failures
        self.needs_weights = needs_weights
        self.asked: list[str] = []

    def start(self, request: Callable[[Any], Any]) -> Callable[[], list[Any]]:
        call = recorded(request)
        if call.method == "needs_weights":
            return lambda: [False, self.needs_weights]
        self.asked.append(" ".join(map(str, (call.method, *call.args))))
        if call.method.startswith("generate") and self.failures:
            raise self.failures.pop(0)
        return lambda: [1, 0]

    def tell(self, request: Callable[[Any], Any]) -> None:
        self.start(request)

    def on(self, rank: int, request: Callable[[Any], Any]) -> Any:
        raise AssertionError


class FakeSession(Session):
    """A session of rollout workers alone."""

    def __init__(self, rollout: Rollout) -> None:
        self.roles = Roles.of({"rollout": rollout, "actor": rollout})
        self.asked = rollout.asked

    def publish_weights(self, version: int) -> None:
        self.asked.append(f"publish {version}")

    def copy_weights(self, version: int) -> None:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError


def run(*failures: Exception) -> tuple[Rollout, Callable[[], tuple[list[Any], int]]]:
    """A rollout that fails so often, and the call."""
    rollout = Rollout(list(failures))
    return rollout, lambda: FakeSession(rollout).with_revival(7, lambda r: r.generate(7))


def test_without_a_failure_nothing_else_happens() -> None:
    rollout, call = run()
    assert call() == ([1, 0], 0)
    assert rollout.asked == ["wake", "generate 7", "sleep"]


def test_weights_given_up_in_sleep_are_published_again() -> None:
    rollout = Rollout([], needs_weights=True)
    FakeSession(rollout).with_revival(7, lambda r: r.generate(7))
    assert rollout.asked == ["publish 7", "wake", "generate 7", "sleep"]


def test_revived_servers_get_weights_before_missing_samples() -> None:
    rollout, call = run(DIED)
    assert call() == ([1, 0], 1)
    expected = ["wake", "generate 7", "sleep", "revive", "publish 7", "wake", "generate 7", "sleep"]
    assert rollout.asked == expected


def test_a_server_that_dies_again_ends_the_run() -> None:
    rollout, call = run(DIED, DIED)
    with pytest.raises(ServerDied):
        call()
    assert rollout.asked.count("revive") == 1


def test_other_failures_end_the_run_at_once() -> None:
    rollout, call = run(RunError(Problem(id="sglang-reply", message="bad", fix="look")))
    with pytest.raises(RunError, match="bad"):
        call()
    assert "revive" not in rollout.asked
