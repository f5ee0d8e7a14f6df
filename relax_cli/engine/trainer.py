"""The loop: step, record, save, evaluate. What one step does is in `step.py`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from relax_cli.checkpoint.layout import Best
from relax_cli.config.redact import config_dump
from relax_cli.config.schema import Config
from relax_cli.engine.sampling import Sampling
from relax_cli.engine.saving import PairSaver
from relax_cli.engine.session import RolloutGroup, Session
from relax_cli.engine.step import StepRecord, run_step
from relax_cli.engine.stopping import StopRequest
from relax_cli.errors import ProcessLost, RelaxError
from relax_cli.plugin.manager import Plugins
from relax_cli.plugin.trackers import TrackedRun, tracker_names
from relax_cli.roles.evaluation import eval_metrics
from relax_cli.tracking.live import StepDisplay
from relax_cli.tracking.run_files import MetricsWriter
from relax_cli.tracking.symptoms import HealthWatch
from relax_cli.tracking.trackers import Trackers


@dataclass
class Recorder:
    """Hands each step to the metrics file, the trackers, the screen and the plugins, in this order."""

    metrics: MetricsWriter
    display: StepDisplay
    plugins: Plugins
    config: Config
    run_dir: Path
    trackers: Trackers = field(init=False)

    def open_trackers(self, done: int) -> None:
        """Before the first step, with `done` rollouts finished. Raises EnvironmentFault: one cannot be opened."""
        known, names = self.plugins.trackers(), tracker_names(self.config.run)
        if names:
            self.display.status(f"opening {', '.join(names)}")
        run = TrackedRun(self.run_dir, config_dump(self.config), done)
        self.trackers = Trackers([known[name] for name in names], run, self.warn)

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        """Step `step` is done: the `step`-th rollout of the run; `warnings` are the symptoms that are new."""
        self.display.show(self._record(step, metrics | {"memory_gb": memory_gb()}))
        for symptom in metrics.get("warnings", ()):
            self.display.warn("{seen}; look at {look_at} [{id}]".format(**symptom))
        self._tell_plugins(step, metrics)

    def evaluated(self, step: int, metrics: dict[str, Any]) -> None:
        """The held-out sets were evaluated after step `step`, 0 being before the first."""
        self.display.evaluated(self._record(step, metrics))
        self._tell_plugins(step, metrics)

    def _record(self, step: int, metrics: dict[str, Any]) -> dict[str, Any]:
        record = {"step": step, "time": time.time(), **metrics}
        self.metrics.write(record)
        self.trackers.write(record)
        return record

    def _tell_plugins(self, step: int, metrics: dict[str, Any]) -> None:
        for warning in self.plugins.step_end(step, metrics, self.config, self.run_dir):
            self.warn(f"{warning.message}: {warning.got}")

    def warn(self, message: str) -> None:
        """Show it, and keep it with the metrics."""
        self.display.warn(message)
        self.metrics.warn(message)


def memory_gb() -> float:
    """Memory that this process and those it started have for themselves on this machine."""
    me = psutil.Process()
    used = 0
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.Error):
            memory = process.memory_info()
            used += memory.rss - getattr(memory, "shared", 0)
    return used / 1e9


@dataclass
class RunReport:
    """What a run reached."""

    first: int = 0
    """Rollouts that were finished when this run began."""
    steps: int = 0
    seconds: float = 0.0
    rewards: list[float] = field(default_factory=list)
    """Mean reward of every step."""
    saved_iteration: int | None = None
    """Newest checkpoint that this run wrote."""
    best: Best | None = None
    """What `--keep-best` keeps."""


@dataclass
class Trainer:
    """Runs rollouts `first` to `num_rollout - 1` on a session, or fewer when a stop is requested."""

    session: Session
    config: Config
    watcher: Recorder
    stop: StopRequest
    first: int
    """Rollouts that are finished."""
    dump_fields: list[str]
    """Queue fields to write next to each sample."""
    checkpoint_meta: InitVar[dict[str, Any]]
    """What every checkpoint says about the run."""
    recorded: Mapping[str, Any] | None = None
    """Metrics of rollout `first` in the run folder; None when nothing of it is there."""
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self, checkpoint_meta: dict[str, Any]) -> None:
        assert self.config.batch.num_rollout is not None, "resolved before launch"
        self.last = self.config.batch.num_rollout
        self.sets = [name for name, _ in self.config.eval.sets]
        self.saver = PairSaver(self.session.roles.trained, self.config, checkpoint_meta, warn=self.watcher.warn)
        self.saver.take_over_best(self.first)
        self.report = RunReport(first=self.first)
        self.health = HealthWatch()

    def run(self) -> None:
        """Train; the report is complete up to the last finished step even if this raises.
        Raises OSError: metrics or samples could not be written."""
        try:
            self._run()
        except ProcessLost:
            raise
        except Exception:
            with suppress(RelaxError):
                self.saver.outlast()
                self._publish()
            raise

    def _run(self) -> None:
        self.session.publish_weights(version=self.first)
        self._begin()
        if self.first == self.last:
            self.saver.rotate(self.last)  # A run that was killed after its last save may have left more than it keeps.
        for rollout_id in range(self.first, self.last):
            self.stop.doing = f"finishing step {rollout_id + 1}, then {self._ending}"
            started = time.perf_counter()
            record = run_step(
                self.session,
                rollout_id,
                sampling=self.sampling,
                critic_only_steps=self.config.critic.num_critic_only_steps,
                overlap_updates=self.config.parallel.overlap_updates,
                dump_fields=self.dump_fields,
                starts_phase=self._start_phase,
            )
            self._end_step(record, started)
            done = rollout_id + 1
            if self.stop.requested_stop is None and self._due(self.config.eval.eval_interval, done):
                self.stop.doing = f"finishing the evaluation, then {self._ending}"
                found = self._evaluate(done)
                if self.saver.is_best(found):
                    self._save_late(done)
                    self.saver.keep_best(done, found)
                    self.report.best = self.saver.best
            if self.stop.requested_stop is not None:
                self._save_late(done)
                break
        self._publish()
        self.session.roles.rollout.finish_dump()

    def _start_phase(self, name: str) -> None:
        """Between two phases no role is busy: a pair that was written meanwhile counts from now on."""
        if self.saver.is_written:
            self._publish()
        self.watcher.display.phase(name)

    def _begin(self) -> None:
        """Evaluate before the first step, or what a run that was killed has left."""
        found = dict(self.recorded or {})
        missing = any(f"eval/{name}/samples" not in found for name in self.sets)
        if self.recorded is None or (self._due(self.config.eval.eval_interval, self.first) and missing):
            found |= self._evaluate(self.first)
        if self.saver.is_best(found):
            self.saver.keep_best(self.first, found)
        self.report.best = self.saver.best

    @property
    def _ending(self) -> str:
        return "saving" if self.config.checkpoint.save else "stopping (without --save nothing is kept)"

    def _end_step(self, record: StepRecord, started: float) -> None:
        """Save if it is time, and record: a pair counts only once the metrics of all its steps are on the disk."""
        done = record.rollout_id + 1
        saves = self.config.checkpoint.save is not None
        if saves and (self.stop.requested_stop is not None or self._due(self.config.checkpoint.save_interval, done)):
            with record.phase("checkpoint"):
                self._prepare(done)
        seconds = time.perf_counter() - started
        generated = record.metrics.get("sampling/response_tokens", record.metrics["tokens/response"])
        metrics: dict[str, Any] = {
            **record.metrics,
            "tokens_per_second": record.metrics["tokens/total"] / seconds,
            "rollout/tokens_per_second": generated / record.phase_seconds["rollout"],
            "step_seconds": seconds,
            "phase_seconds": record.phase_seconds,
        }
        self.report.steps += 1
        self.report.seconds += seconds
        self.report.rewards.append(record.metrics["reward/mean"])
        if warnings := self._warnings(done, record.metrics):
            metrics["warnings"] = warnings
        try:
            self.watcher.step(done, metrics)
        except OSError:
            if self.saver.pending == done:
                self.saver.abandon()
            raise
        if self.saver.is_written:
            self._publish()

    def _save_late(self, done: int) -> None:
        """Save a step that was recorded before the stop was requested; does nothing when it is saved."""
        if done not in (self.report.saved_iteration, self.saver.pending):
            self._prepare(done)
        self._publish()

    def _prepare(self, done: int) -> None:
        self._publish()
        self.watcher.display.status(f"saving iteration {done}")
        self.saver.prepare(done, self.sampling.position(self.session.roles.rollout))

    def _publish(self) -> None:
        """Let a prepared pair count, once it is written and the samples of all its steps are on the disk."""
        if self.saver.pending is not None and not self.saver.is_written:
            self.watcher.display.status(f"saving iteration {self.saver.pending}")
        self.saver.complete()
        if self.saver.pending is None:
            return
        try:
            self.session.roles.rollout.finish_dump()
        except RelaxError:
            self.saver.abandon()
            raise
        self.saver.publish()
        self.report.saved_iteration = self.saver.saved

    def _due(self, interval: int | None, done: int) -> bool:
        return done == self.last or (interval is not None and done % interval == 0)

    def _warnings(self, step: int, metrics: dict[str, float]) -> list[dict[str, str]]:
        """What the step shows of the run's health; once the policy has died, the newest pair from before is kept."""
        found, saver = self.health.observe(step, metrics), self.saver
        is_alive = self.health.history.is_alive
        if is_alive and self.config.checkpoint.keep_checkpoints != 1:
            saver.good = self.report.saved_iteration
        saver.keeps_good = not is_alive
        kept = "" if saver.good is None else f"; iteration {saver.good} was saved before and is kept"
        return [w | {"seen": w["seen"] + kept} if w["id"] == "policy-died" else w for w in found]

    def _evaluate(self, done: int) -> dict[str, Any]:
        if not self.sets:
            return {}

        def evaluate(rollout: RolloutGroup) -> dict[str, Any]:
            metrics: dict[str, Any] = {}
            for name in self.sets:
                self.watcher.display.status(f"evaluating {name}")
                started = time.perf_counter()
                metrics |= eval_metrics(name, rollout.evaluate(name), self.config.eval.eval_pass_reward)
                metrics[f"eval/{name}/seconds"] = time.perf_counter() - started
            return metrics

        # All sets while the servers are awake: what they give up when they sleep has to be sent to them again.
        metrics, _ = self.session.with_revival(done, evaluate)
        self.session.roles.rollout.dump_evaluation(done)
        self.watcher.evaluated(done, metrics)
        return metrics
