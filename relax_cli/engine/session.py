"""A running set of roles under any launcher: the schedule sees only this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING

from relax_cli.engine.groups import Roles

if TYPE_CHECKING:
    from relax_cli.backends.rollout.targets import WeightTarget


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
            self.roles.rollout.wake_for_weights()
            self.roles.actor.send_weights(self.targets, version)
        self.roles.rollout.weights_updated(version)

    @cached_property
    def targets(self) -> list[WeightTarget]:
        """The servers of all rollout workers; none where workers generate themselves."""
        return self.roles.rollout.weight_targets()

    @abstractmethod
    def copy_weights(self, version: int) -> None:
        """Bring the actor's weights into the rollout workers' own engines."""

    @abstractmethod
    def close(self) -> None:
        """End every process that the launcher started; safe to call twice."""
