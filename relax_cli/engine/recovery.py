"""Recovery from a rollout server that died: it is started again and gets the newest weights, once."""

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

    Args:
        version: the weights they have.
        again: what to do once servers were started again; `work` where it is None.

    Returns:
        the result, and how many servers were started again.

    Raises:
        RelaxError: what the role raised, and a server that died twice.
    """
    rollout = session.roles.rollout
    try:
        with rollout.awake():
            return work(rollout), 0
    except ServerDied:
        revived = rollout.revive()
        session.publish_weights(version)
        with rollout.awake():
            return (again or work)(rollout), revived
