"""A running set of roles under any launcher, which is all that the schedule sees."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from relax_cli.backends.rollout.protocol import ServerDied, WeightsNotSent

if TYPE_CHECKING:
    from relax_cli.backends.rollout.targets import WeightTarget
    from relax_cli.roles.actor import ActorRole
    from relax_cli.roles.advantages import AdvantagesRole
    from relax_cli.roles.critic import CriticRole
    from relax_cli.roles.reference import ReferenceRole
    from relax_cli.roles.rollout import RolloutRole
    from relax_cli.roles.training import ModelRole, TrainingRole


Role = TypeVar("Role", covariant=True)
Result = TypeVar("Result")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Call:
    """One call of a role's method, in a form that travels between processes."""

    method: str
    args: tuple[Any, ...]


class _Recorder:
    def __getattr__(self, method: str) -> Callable[..., Call]:
        return lambda *args: Call(method, args)


def recorded(request: Callable[[Any], Any]) -> Call:
    """The method that a request calls, and its arguments; nothing is executed."""
    call = request(_Recorder())
    assert isinstance(call, Call), "a request calls one method of the role, with positional arguments"
    return call


class Ranks(ABC, Generic[Role]):
    """All ranks of one role, in any process.

    A request such as `lambda critic: critic.predict(7)` is checked against the role's class. Launchers either call it
    with the role or send what it calls (`recorded`) to another process.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def start(self, request: Callable[[Role], Result]) -> Callable[[], list[Result]]:
        """Begin on every rank, at the latest when waited for; the returned function waits for one result per rank."""

    @abstractmethod
    def on(self, rank: int, request: Callable[[Role], Result]) -> Result:
        """Call on one rank."""

    @abstractmethod
    def tell(self, request: Callable[[Role], object]) -> None:
        """Have every rank do something after a failure; neither waits for it nor reports how it went."""

    def all(self, request: Callable[[Role], Result]) -> list[Result]:
        """Call on every rank at the same time; one result per rank."""
        return self.start(request)()

    def first(self, request: Callable[[Role], Result]) -> Result:
        """Call on every rank; the result of the first one, as of metrics that all ranks have alike."""
        return self.all(request)[0]

    def gather(self, request: Callable[[Role], Iterable[Item]]) -> list[Item]:
        """Call on every rank; what all of them return, one after the other."""
        return [item for share in self.all(request) for item in share]


@contextlib.contextmanager
def awake(ranks: Ranks[RolloutRole | ModelRole]) -> Iterator[None]:
    """A role that shares its device with others has it inside the block and leaves it afterwards."""
    ranks.all(lambda role: role.wake())
    try:
        yield
    except Exception:
        # The first failure is the one to report, at once: the clean-up must neither hide nor delay it.
        ranks.tell(lambda role: role.sleep())
        raise
    ranks.all(lambda role: role.sleep())


@dataclass(frozen=True)
class Roles:
    """The deployed roles; an estimator without a critic has neither critic nor advantages."""

    rollout: Ranks[RolloutRole]
    actor: Ranks[ActorRole]
    critic: Ranks[CriticRole] | None = None
    advantages: Ranks[AdvantagesRole] | None = None
    reference: Ranks[ReferenceRole] | None = None
    """Only where a KL term needs it."""

    @property
    def trained(self) -> list[Ranks[TrainingRole]]:
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
        with awake(self.roles.actor):
            try:
                self._send_weights(version)
            except (ServerDied, WeightsNotSent):
                # One that died asleep or while it was sent to is started again, once: it gets all weights anyway.
                if not self._revive():
                    raise
                self._send_weights(version)
        self.roles.rollout.all(lambda rollout: rollout.weights_updated(version))

    def _send_weights(self, version: int) -> None:
        self.roles.rollout.all(lambda rollout: rollout.wake_for_weights())
        self.roles.actor.all(lambda actor: actor.send_weights(self.targets, version))

    def _revive(self) -> int:
        return sum(self.roles.rollout.all(lambda rollout: rollout.revive()))

    @cached_property
    def targets(self) -> list[WeightTarget]:
        """The servers of all rollout workers; none where workers generate themselves."""
        return self.roles.rollout.gather(lambda rollout: rollout.weight_targets())

    def with_revival(self, version: int, work: Callable[[Ranks[RolloutRole]], Result]) -> tuple[Result, int]:
        """What the awake rollout workers answer, and how many servers had to be started again, which happens once.

        Weights that they gave up with their memory, for another role after an evaluation, are published again, as of
        `version`. After a revival `work` is called again: workers keep what they have sampled.
        """
        rollout = self.roles.rollout
        if any(rollout.all(lambda worker: worker.needs_weights())):
            self.publish_weights(version)
        try:
            with awake(rollout):
                return work(rollout), 0
        except ServerDied:
            revived = self._revive()
            self.publish_weights(version)
            with awake(rollout):
                return work(rollout), revived

    @abstractmethod
    def copy_weights(self, version: int) -> None:
        """Bring the actor's weights into the rollout workers' own engines."""

    @abstractmethod
    def close(self) -> None:
        """End every process that the launcher started; safe to call twice."""
