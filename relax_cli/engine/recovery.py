"""What goes on after an SGLang server of the run has died: it is started again and gets the newest weights, once."""

from __future__ import annotations

from typing import Any

from relax_cli.backends.rollout.sglang.server import ServerDied
from relax_cli.engine.session import Session


def run_rollout(
    session: Session, version: int, method: str, *args: Any, again: str | None = None
) -> tuple[list[Any], int]:
    """Call a method of the rollout workers while they are awake.

    Args:
        version: the weights they have.
        again: the method to call once servers were started again; the same one where it is None.

    Returns:
        one result per rank, and how many servers were started again.

    Raises:
        RelaxError: what the role raised, and a server that died twice.
    """
    rollout = session.roles.rollout
    try:
        with rollout.awake():
            return rollout.run(method, *args), 0
    except ServerDied:
        revived = sum(rollout.run("revive"))
        session.publish_weights(version)
        with rollout.awake():
            return rollout.run(again or method, *args), revived
