"""A running set of roles under any launcher: the schedule sees only this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from relax_cli.backends.rollout.protocol import ServerDied, WeightsNotSent
from relax_cli.engine.groups import Result, Roles, RolloutGroup

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
            try:
                self._send_weights(version)
            except (ServerDied, WeightsNotSent):
                # One that died asleep or while it was sent to is started again, once: it gets all weights anyway.
                if not self.roles.rollout.revive():
                    raise
                self._send_weights(version)
        self.roles.rollout.weights_updated(version)

    def _send_weights(self, version: int) -> None:
        self.roles.rollout.wake_for_weights()
        self.roles.actor.send_weights(self.targets, version)

    @cached_property
    def targets(self) -> list[WeightTarget]:
        """The servers of all rollout workers; none where workers generate themselves."""
        return self.roles.rollout.weight_targets()

    def with_revival(self, version: int, work: Callable[[RolloutGroup], Result]) -> tuple[Result, int]:
        """What the awake rollout workers answer, and how many servers had to be started again, which happens once.

        Weights that they gave up with their memory, for another role after an evaluation, are published again.

        Args:
            version: the newest weights.
            work: called again after a revival; workers keep what they have sampled.

        Raises:
            RelaxError: what the role raised, and a server that died twice.
        """
        rollout = self.roles.rollout
        if rollout.needs_weights():
            self.publish_weights(version)
        try:
            with rollout.awake():
                return work(rollout), 0
        except ServerDied:
            revived = rollout.revive()
            self.publish_weights(version)
            with rollout.awake():
                return work(rollout), revived

    @abstractmethod
    def copy_weights(self, version: int) -> None:
        """Bring the actor's weights into the rollout workers' own engines."""

    @abstractmethod
    def close(self) -> None:
        """End every process that the launcher started; safe to call twice."""
