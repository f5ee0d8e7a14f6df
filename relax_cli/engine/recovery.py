"""Rollout servers at work: they have the newest weights, and one that dies is started again and gets them, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from relax_cli.backends.rollout.protocol import ServerDied
from relax_cli.engine.groups import RolloutGroup
from relax_cli.engine.session import Session

Result = TypeVar("Result")


def with_revival(
    session: Session,
    version: int,
    work: Callable[[RolloutGroup], Result],
    *,
    again: Callable[[RolloutGroup], Result] | None = None,
) -> tuple[Result, int]:
    """Have the rollout workers do something while they are awake.

    Weights that they gave up with their memory, for another role after an evaluation, are published again.

    Args:
        version: the newest weights.
        again: what to do once servers were started again; `work` where it is None.

    Returns:
        the result, and how many servers were started again.

    Raises:
        RelaxError: what the role raised, and a server that died twice.
    """
    rollout = session.roles.rollout
    if rollout.needs_weights():
        session.publish_weights(version)
    try:
        with rollout.awake():
            return work(rollout), 0
    except ServerDied:
        revived = rollout.revive()
        session.publish_weights(version)
        with rollout.awake():
            return (again or work)(rollout), revived
