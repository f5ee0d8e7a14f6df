"""A running set of roles, however they were launched: the schedule sees only this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any


class RoleGroup(ABC):
    """All ranks of one role."""

    def __init__(self, name: str, ranks: int) -> None:
        self.name = name
        self.ranks = ranks

    @abstractmethod
    def start(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """Begin a method of the role on every rank; the returned function waits for one result per rank."""

    def run(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the role on every rank at once; one result per rank."""
        return self.start(method, *args)()

    @abstractmethod
    def run_on(self, rank: int, method: str, *args: Any) -> Any:
        """Call a method on one rank."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """The role holds its device inside the block and leaves it afterwards."""
        self.run("wake")
        try:
            yield
        finally:
            self.run("sleep")


@dataclass(frozen=True)
class Roles:
    """The deployed roles; an estimator without a critic has neither critic nor advantages."""

    rollout: RoleGroup
    actor: RoleGroup
    critic: RoleGroup | None = None
    advantages: RoleGroup | None = None
    reference: RoleGroup | None = None
    """Only where a KL term needs it."""

    @property
    def trained(self) -> list[RoleGroup]:
        """Roles with weights to save."""
        return [role for role in (self.actor, self.critic) if role is not None]


class Session(ABC):
    """What a launcher returns."""

    roles: Roles

    def publish_weights(self, version: int) -> None:
        """Bring the actor's weights to every rollout engine without passing them through this process.

        Servers take back the memory of their weights alone; that of their cache comes with the next generation, when
        the actor has left.
        """
        if not self.targets:
            self.copy_weights(version)
            return
        with self.roles.actor.awake():
            self.roles.rollout.run("wake_for_weights")
            self.roles.actor.run("send_weights", self.targets, version)
        self.roles.rollout.run("weights_updated", version)

    @cached_property
    def targets(self) -> list[Any]:
        """The servers of all rollout workers (`WeightTarget`); none where workers generate themselves."""
        return [target for targets in self.roles.rollout.run("weight_targets") for target in targets]

    @abstractmethod
    def copy_weights(self, version: int) -> None:
        """Bring the actor's weights into the rollout workers' own engines."""

    @abstractmethod
    def close(self) -> None:
        """End every process that the launcher started; safe to call twice."""
