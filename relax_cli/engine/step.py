"""One training step, top to bottom: the order of the PPO page.

Rollout → queue → Reference (for KL terms) → Critic (values to the queue, local returns, value step) → Advantages (GAE)
→ Actor (policy step) → weights to Rollout → partition cleared. Roles that an estimator does not need are absent, and
the rest is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from relax_cli.engine.sampling import Sampling
from relax_cli.engine.session import Roles, Session
from relax_cli.roles.sample_files import TRAINED_FIELDS
from relax_cli.roles.spread import Spread, merge_spreads


@dataclass
class StepRecord:
    """What one step measured."""

    rollout_id: int
    starts: Callable[[str], None]
    """Told the name of every phase when it starts."""
    metrics: dict[str, float] = field(default_factory=dict)
    phase_seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as the phase `name`."""
        self.starts(name)
        started = time.perf_counter()
        yield
        self.phase_seconds[name] = time.perf_counter() - started

    def add_rollout(self, shares: Sequence[dict[str, Spread]]) -> None:
        """Metrics of generation from the spreads of all workers."""
        spreads = merge_spreads(shares)
        lengths = spreads["response_len"]
        for name in ("reward", "response_len"):
            self.metrics |= spreads[name].metrics(name)
        self.metrics["prompt_len/mean"] = spreads["prompt_len"].mean
        self.metrics["truncated_frac"] = spreads["truncated"].mean
        if "masked" in spreads:
            self.metrics["masked_frac"] = spreads["masked"].mean
        if "failed" in spreads:
            self.metrics["reward/failed"] = spreads["failed"].total
        if "partial/staleness" in spreads:
            self.metrics |= spreads.pop("partial/staleness").metrics("partial/staleness")
        named = ("reward/part/", "sampling/", "groups/", "episode/", "curriculum/", "partial/")
        self.metrics |= {
            name: spread.mean for name, spread in spreads.items() if name.startswith(named) and spread.count
        }
        self.metrics["tokens/response"] = lengths.total
        self.metrics["tokens/total"] = lengths.total + spreads["prompt_len"].total


def run_step(
    session: Session,
    rollout_id: int,
    *,
    sampling: Sampling,
    critic_only_steps: int,
    overlap_updates: bool,
    dump_fields: Sequence[str],
    starts_phase: Callable[[str], None],
) -> StepRecord:
    """Run step `rollout_id`.

    Args:
        sampling: draws the prompts.
        critic_only_steps: the actor does not learn before this step, yet publishes its weights.
        overlap_updates: actor and critic work at the same time, each as soon as what it needs is in the queue.
        dump_fields: queue fields to write next to each sample into the run folder.
        starts_phase: called with the name of every phase when it starts.
    """
    roles, record = session.roles, StepRecord(rollout_id, starts_phase)
    actor_learns = roles.critic is None or rollout_id >= critic_only_steps
    overlap = overlap_updates and actor_learns and roles.critic is not None
    with record.phase("rollout"):
        shares, revived = session.with_revival(rollout_id, lambda rollout: sampling.generate(rollout, rollout_id))
        record.add_rollout(shares)
        if revived:
            record.metrics["rollout/server_restarts"] = revived
    if roles.reference:
        with record.phase("reference"), roles.reference.awake():
            roles.reference.score(rollout_id)
    if overlap:
        _learn_together(roles, record)
    else:
        _learn_in_turn(roles, record, actor_learns=actor_learns)
    with record.phase("publish"):
        session.publish_weights(version=rollout_id + 1)
    with record.phase("record"):
        of_actor = (TRAINED_FIELDS["actor"], "old_log_probs")
        written = [name for name in dump_fields if actor_learns or name not in of_actor]
        roles.rollout.dump(rollout_id, written)
        roles.rollout.clear(rollout_id)
    sampling.finish()
    return record


def _learn_in_turn(roles: Roles, record: StepRecord, *, actor_learns: bool) -> None:
    """Critic, Advantages and Actor, of which at most one is awake."""
    if roles.critic:
        with record.phase("critic"), roles.critic.awake():
            record.metrics |= roles.critic.predict(record.rollout_id)
            record.metrics |= roles.critic.update()
    if roles.advantages:
        with record.phase("advantages"):
            record.metrics |= roles.advantages.compute(record.rollout_id)
    if actor_learns:
        with record.phase("actor"), roles.actor.awake():
            record.metrics |= roles.actor.train(record.rollout_id)


def _learn_together(roles: Roles, record: StepRecord) -> None:
    """The same numbers: the actor's first forward pass needs no advantages, the critic's update neither."""
    assert roles.critic is not None
    with roles.critic.awake(), roles.actor.awake():
        with record.phase("critic"):
            actor_begins = roles.actor.start_begin(record.rollout_id)
            record.metrics |= roles.critic.predict(record.rollout_id)
            critic_update = roles.critic.start_update()
        if roles.advantages:
            with record.phase("advantages"):
                record.metrics |= roles.advantages.compute(record.rollout_id)
        with record.phase("updates"):
            actor_begins()
            record.metrics |= roles.actor.train(record.rollout_id)
            record.metrics |= critic_update()
