"""In which order weights go from the actor to the rollout engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relax_cli.backends.rollout.protocol import ServerDied, WeightsNotSent
from relax_cli.backends.rollout.targets import WeightTarget
from relax_cli.engine.session import Ranks, Roles, Session, recorded
from relax_cli.errors import Problem

TARGETS = [WeightTarget("a:1", "node", 0, 2), WeightTarget("b:1", "node", 2, 2)]


class Recorded(Ranks[Any]):
    """Two ranks that do nothing and write down what they are asked."""

    def __init__(self, name: str, calls: list[str], answers: dict[str, Any]) -> None:
        super().__init__(name)
        self.calls = calls
        self.answers = answers

    def start(self, request: Callable[[Any], Any]) -> Callable[[], list[Any]]:
        call = recorded(request)
        self.calls.append(" ".join([self.name, call.method, *(str(arg) for arg in call.args if isinstance(arg, int))]))
        answer = self.answers.get(call.method)
        if call.method in ("send_weights", "wake_for_weights") and isinstance(answer, list):
            answer = answer.pop(0) if answer else None
        if isinstance(answer, Exception):
            raise answer
        return lambda: answer or [None] * 2

    def tell(self, request: Callable[[Any], Any]) -> None:
        self.start(request)

    def on(self, rank: int, request: Callable[[Any], Any]) -> Any:
        raise AssertionError("not used")


class RecordedSession(Session):
    def __init__(self, targets: list[Any], **answers: Any) -> None:
        self.calls: list[str] = []
        per_worker = {"weight_targets": [targets[:1], targets[1:]]}
        self.roles = Roles.of(
            {
                "rollout": Recorded("rollout", self.calls, per_worker | answers),
                "actor": Recorded("actor", self.calls, answers),
            }
        )

    def copy_weights(self, version: int) -> None:
        self.calls.append(f"copied {version}")

    def close(self) -> None: ...


def test_servers_get_room_for_weights_first_then_for_the_cache() -> None:
    session = RecordedSession(TARGETS)
    session.publish_weights(4)
    session.publish_weights(5)
    assert session.calls == ["rollout weight_targets"] + [
        call.format(version)
        for version in (4, 5)
        for call in (
            "actor wake",
            "rollout wake_for_weights",
            "actor send_weights {}",
            "actor sleep",
            "rollout weights_updated {}",
        )
    ]
    assert session.targets == TARGETS


def test_the_actor_sleeps_after_a_failure_at_the_old_version() -> None:
    session = RecordedSession(TARGETS, send_weights=ValueError("refused"))
    with pytest.raises(ValueError, match="refused"):
        session.publish_weights(4)
    assert session.calls[-2:] == ["actor send_weights 4", "actor sleep"]


def test_engines_inside_the_workers_get_copies() -> None:
    session = RecordedSession([])
    session.publish_weights(4)
    assert session.calls == ["rollout weight_targets", "copied 4"]


PROBLEM = Problem(id="sglang-weights", message="not sent", fix="look")
FAILURES = [("send_weights", WeightsNotSent(PROBLEM)), ("wake_for_weights", ServerDied(PROBLEM))]


@pytest.mark.parametrize(("method", "failure"), FAILURES)
def test_a_server_that_dies_around_a_publication_is_revived_once(method: str, failure: Exception) -> None:
    session = RecordedSession(TARGETS, revive=[1, 0], **{method: [failure]})
    session.publish_weights(4)
    assert session.calls.count("rollout revive") == 1
    assert session.calls[-5:] == [
        "rollout revive",
        "rollout wake_for_weights",
        "actor send_weights 4",
        "actor sleep",
        "rollout weights_updated 4",
    ]
    again = RecordedSession(TARGETS, revive=[1, 0], **{method: [failure, failure]})
    with pytest.raises(type(failure)):
        again.publish_weights(4)


@pytest.mark.parametrize(("method", "failure"), FAILURES)
def test_where_no_server_died_the_failure_is_raised(method: str, failure: Exception) -> None:
    session = RecordedSession(TARGETS, revive=[0, 0], **{method: [failure]})
    with pytest.raises(type(failure)):
        session.publish_weights(4)
    assert not any("weights_updated" in call for call in session.calls)
