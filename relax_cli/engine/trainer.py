"""The loop: step, record, save, evaluate. What one step does is in `step.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from relax_cli.config.schema import Config
from relax_cli.engine.session import Session
from relax_cli.engine.step import StepRecord, run_step
from relax_cli.roles.records import EvalShare
from relax_cli.tracking.spread import Spread

EXAMPLES = 3
"""Judged samples of each held-out set kept for a person to read."""

HEAD_MOVES_WITHIN = 3
"""Rollouts after which a value head that is what it was is worth a warning."""


class Watcher(Protocol):
    """Gets every finished step's metrics: files, screen, plugins."""

    def step(self, rollout_id: int, metrics: dict[str, Any]) -> None:
        """One step is done."""

    def warn(self, message: str) -> None:
        """Something a person should know of while the run goes on."""


@dataclass(frozen=True)
class Evaluation:
    """A held-out set at one point of the run."""

    name: str
    rollout_id: int
    """Finished rollouts at that point."""
    reward: Spread
    examples: list[dict[str, Any]]


@dataclass
class RunReport:
    """What a run reached."""

    steps: int = 0
    seconds: float = 0.0
    rewards: list[float] = field(default_factory=list)
    """Mean reward of every step."""
    evaluations: list[Evaluation] = field(default_factory=list)
    saved_iteration: int | None = None


class Trainer:
    """Runs rollouts `first` to `num_rollout - 1` on a session."""

    def __init__(
        self,
        session: Session,
        config: Config,
        watchers: list[Watcher],
        *,
        first: int,
        dump_fields: list[str],
        checkpoint_meta: dict[str, Any],
        status: Callable[[str], None],
    ) -> None:
        assert config.batch.num_rollout is not None, "resolved before launch"
        self.session = session
        self.config = config
        self.watchers = watchers
        self.first = first
        self.last = config.batch.num_rollout
        self.dump_fields = dump_fields
        self.checkpoint_meta = checkpoint_meta
        self.status = status
        self.report = RunReport(saved_iteration=first or None)
        self.head_moved = False

    def run(self) -> RunReport:
        """Train; the report is complete up to the last finished step even if this raises."""
        self.session.publish_weights(version=self.first)
        self._evaluate(self.first)
        for rollout_id in range(self.first, self.last):
            started = time.perf_counter()
            record = run_step(
                self.session,
                rollout_id,
                critic_only_steps=self.config.critic.num_critic_only_steps,
                overlap_updates=self.config.parallel.overlap_updates,
                dump_fields=self.dump_fields,
            )
            done = rollout_id + 1
            if self._due(self.config.checkpoint.save_interval, done) and self.config.checkpoint.save:
                with record.phase("checkpoint"):
                    self._save(done)
            self._finish_step(record, time.perf_counter() - started)
            if self._due(self.config.eval.eval_interval, done):
                self._evaluate(done)
        return self.report

    def _due(self, interval: int | None, done: int) -> bool:
        return done == self.last or (interval is not None and done % interval == 0)

    def _finish_step(self, record: StepRecord, seconds: float) -> None:
        tokens = record.metrics["tokens/total"]
        metrics: dict[str, Any] = {
            **record.metrics,
            "tokens_per_second": tokens / seconds,
            "rollout/tokens_per_second": record.metrics["tokens/response"] / record.phase_seconds["rollout"],
            "step_seconds": seconds,
            "phase_seconds": record.phase_seconds,
        }
        self.report.steps += 1
        self.report.seconds += seconds
        self.report.rewards.append(record.metrics["reward/mean"])
        for watcher in self.watchers:
            watcher.step(record.rollout_id, metrics)
        self._watch_value_head(record)

    def _watch_value_head(self, record: StepRecord) -> None:
        """One warning when the first rollouts left the value head where it was: the critic does not learn."""
        moved = record.metrics.get("critic/value_head_moved")
        self.head_moved = self.head_moved or moved is None or moved > 0
        if self.report.steps == HEAD_MOVES_WITHIN and not self.head_moved:
            for watcher in self.watchers:
                watcher.warn(
                    f"the critic's value head has not moved in {HEAD_MOVES_WITHIN} rollouts: look at "
                    "critic/lr, critic/grad_norm and critic/skipped_steps (--critic-lr, --critic-lr-warmup-iters)"
                )

    def _evaluate(self, done: int) -> None:
        rollout = self.session.roles.rollout
        for item in self.config.eval.eval_prompt_data:
            name = item.split("=", 1)[0]
            self.status(f"evaluating {name}")
            with rollout.awake():
                shares: list[EvalShare] = rollout.run("evaluate", name, EXAMPLES)
            self.report.evaluations.append(
                Evaluation(
                    name=name,
                    rollout_id=done,
                    reward=Spread.merge(share.rewards for share in shares),
                    examples=[example for share in shares for example in share.examples][:EXAMPLES],
                )
            )

    def _save(self, iteration: int) -> None:
        """Actor and critic as a pair: both are complete under their names before either tracker moves."""
        roles = self.session.roles.trained
        self.status(f"saving iteration {iteration}")
        for role in roles:
            with role.awake():
                role.run("write_checkpoint", iteration, self.checkpoint_meta)
        for role in roles:
            role.run_on(0, "commit_checkpoint", iteration)
        for role in roles:
            role.run_on(0, "publish_checkpoint", iteration, self.config.checkpoint.keep_checkpoints)
        self.report.saved_iteration = iteration
