"""A running set of roles under any launcher, which is all that the schedule sees: typed methods, the same everywhere.

A method of a group calls the role's own of that name, which describes it, on every rank. Where there are results, they
are those of all ranks, or metrics of the first one, which are those of all.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from relax_cli.backends.rollout.protocol import ServerDied, WeightsNotSent

if TYPE_CHECKING:
    from relax_cli.backends.rollout.targets import WeightTarget
    from relax_cli.roles.actor import ActorRole
    from relax_cli.roles.advantages import AdvantagesRole
    from relax_cli.roles.carried import BegunGroup
    from relax_cli.roles.critic import CriticRole
    from relax_cli.roles.evaluation import Outcome
    from relax_cli.roles.pool import DrawnGroup, Progress
    from relax_cli.roles.reference import ReferenceRole
    from relax_cli.roles.rollout import RolloutRole
    from relax_cli.roles.spread import Spread
    from relax_cli.roles.training import ModelRole, TrainingRole


Role = TypeVar("Role", covariant=True)
Result = TypeVar("Result")


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


class RoleGroup:
    """All ranks of one role."""

    def __init__(self, ranks: Ranks[Any]) -> None:
        self.ranks = ranks


class SleepingGroup(RoleGroup):
    """A role that shares its device with others."""

    ranks: Ranks[RolloutRole | ModelRole]

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """The role has its device inside the block and leaves it afterwards."""
        self.ranks.all(lambda role: role.wake())
        try:
            yield
        except Exception:
            # The first failure is the one to report, at once: the clean-up must neither hide nor delay it.
            self.ranks.tell(lambda role: role.sleep())
            raise
        self.ranks.all(lambda role: role.sleep())


class RolloutGroup(SleepingGroup):
    """The generation workers."""

    ranks: Ranks[RolloutRole]

    def generate(self, rollout_id: int) -> list[dict[str, Spread]]:
        return self.ranks.all(lambda rollout: rollout.generate(rollout_id))

    def mixture(self) -> list[tuple[int, float]]:
        """Size and weight of each set of training prompts."""
        return self.ranks.on(0, lambda rollout: rollout.mixture())

    def places(self, first: int, count: int) -> list[int]:
        return self.ranks.on(0, lambda rollout: rollout.places(first, count))

    def draw(self, rollout_id: int, offset: int, rows: Sequence[int]) -> list[DrawnGroup]:
        """The groups of all workers in the order of their prompts."""
        shares = self.ranks.all(lambda rollout: rollout.draw(rollout_id, offset, rows))
        return [group for share in shares for group in share]

    def advance(self, rollout_id: int, part: int, begun: Sequence[tuple[int, int]]) -> list[Progress]:
        return self.ranks.all(lambda rollout: rollout.advance(rollout_id, part, begun))

    def keep(self, rollout_id: int, chosen: Sequence[int], dropped: Sequence[int] = ()) -> list[dict[str, Spread]]:
        return self.ranks.all(lambda rollout: rollout.keep(rollout_id, chosen, dropped))

    def carried(self) -> list[BegunGroup]:
        """What all workers have in flight."""
        return [group for share in self.ranks.all(lambda rollout: rollout.carried()) for group in share]

    def carry(self, groups: Sequence[BegunGroup]) -> None:
        self.ranks.all(lambda rollout: rollout.carry(groups))

    def evaluate(self, name: str) -> list[Outcome]:
        """What all workers found."""
        return [outcome for share in self.ranks.all(lambda rollout: rollout.evaluate(name)) for outcome in share]

    def dump_evaluation(self, step: int) -> None:
        self.ranks.all(lambda rollout: rollout.dump_evaluation(step))

    def weight_targets(self) -> list[WeightTarget]:
        """The servers of all workers; none where workers generate themselves."""
        return [target for targets in self.ranks.all(lambda rollout: rollout.weight_targets()) for target in targets]

    def wake_for_weights(self) -> None:
        self.ranks.all(lambda rollout: rollout.wake_for_weights())

    def needs_weights(self) -> bool:
        """Whether any worker does."""
        return any(self.ranks.all(lambda rollout: rollout.needs_weights()))

    def weights_updated(self, version: int) -> None:
        self.ranks.all(lambda rollout: rollout.weights_updated(version))

    def revive(self) -> int:
        """How many servers of all workers were started again."""
        return sum(self.ranks.all(lambda rollout: rollout.revive()))

    def dump(self, rollout_id: int, fields: Sequence[str]) -> None:
        self.ranks.all(lambda rollout: rollout.dump(rollout_id, fields))

    def finish_dump(self) -> None:
        self.ranks.all(lambda rollout: rollout.finish_dump())

    def clear(self, rollout_id: int) -> None:
        """Drop the rollout's samples from the queue, by the first worker."""
        self.ranks.on(0, lambda rollout: rollout.clear(rollout_id))


class ReferenceGroup(SleepingGroup):
    """The frozen policy."""

    ranks: Ranks[ReferenceRole]

    def score(self, rollout_id: int) -> None:
        self.ranks.all(lambda reference: reference.score(rollout_id))


class AdvantagesGroup(RoleGroup):
    """The Advantages service."""

    ranks: Ranks[AdvantagesRole]

    def compute(self, rollout_id: int) -> dict[str, float]:
        return self.ranks.all(lambda service: service.compute(rollout_id))[0]


class TrainedGroup(SleepingGroup):
    """A model that learns. Every rank writes its part of a checkpoint."""

    ranks: Ranks[TrainingRole]

    def write_checkpoint(self, iteration: int, meta: dict[str, Any]) -> None:
        self.ranks.all(lambda role: role.write_checkpoint(iteration, meta))

    def copy_checkpoint(self, iteration: int, meta: dict[str, Any]) -> None:
        self.ranks.all(lambda role: role.copy_checkpoint(iteration, meta))

    def finish_checkpoint(self) -> None:
        self.ranks.all(lambda role: role.finish_checkpoint())


class ActorGroup(TrainedGroup):
    """The policy."""

    ranks: Ranks[ActorRole]

    def start_begin(self, rollout_id: int) -> Callable[[], object]:
        """Begin `ActorRole.begin` on every rank; the returned function waits for it."""
        return self.ranks.start(lambda actor: actor.begin(rollout_id))

    def train(self, rollout_id: int) -> dict[str, float]:
        return self.ranks.all(lambda actor: actor.train(rollout_id))[0]

    def send_weights(self, targets: Sequence[WeightTarget], version: int) -> None:
        self.ranks.all(lambda actor: actor.send_weights(targets, version))


class CriticGroup(TrainedGroup):
    """The value model."""

    ranks: Ranks[CriticRole]

    def predict(self, rollout_id: int) -> dict[str, float]:
        return self.ranks.all(lambda critic: critic.predict(rollout_id))[0]

    def update(self) -> dict[str, float]:
        return self.start_update()()

    def start_update(self) -> Callable[[], dict[str, float]]:
        """Begin `update`; the returned function waits for its metrics."""
        wait = self.ranks.start(lambda critic: critic.update())
        return lambda: wait()[0]


@dataclass(frozen=True)
class Roles:
    """The deployed roles; an estimator without a critic has neither critic nor advantages."""

    rollout: RolloutGroup
    actor: ActorGroup
    critic: CriticGroup | None = None
    advantages: AdvantagesGroup | None = None
    reference: ReferenceGroup | None = None
    """Only where a KL term needs it."""

    @classmethod
    def of(cls, ranks: Mapping[str, Ranks[Any]]) -> Roles:
        """The groups of all ranks that were launched, by role name."""
        groups: dict[str, type[RoleGroup]] = {
            "rollout": RolloutGroup,
            "actor": ActorGroup,
            "critic": CriticGroup,
            "advantages": AdvantagesGroup,
            "reference": ReferenceGroup,
        }
        return cls(**{name: groups[name](of_role) for name, of_role in ranks.items()})  # type: ignore[arg-type]

    @property
    def trained(self) -> list[TrainedGroup]:
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

        Weights that they gave up with their memory, for another role after an evaluation, are published again, as of
        `version`. After a revival `work` is called again: workers keep what they have sampled.
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
