"""Where the run of a configuration starts, and whether what it would load belongs to it, for `train` and
`validate-config`; `check-resume` asks `resume.examine_resume`, which this builds on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from relax_cli.algorithms.schedule import Schedule
from relax_cli.checkpoint import layout
from relax_cli.checkpoint.fingerprint import adapters_in, differences, folder_of_model, identify
from relax_cli.checkpoint.resume import RUN_DIR_IN_USE, SAVE_IN_USE, ResumeReport, examine_resume
from relax_cli.checkpoint.side import Side
from relax_cli.config.schema import Config
from relax_cli.errors import Problem, ResumeError, problem_kinds
from relax_cli.models.lora import lora_of
from relax_cli.preflight.completion import has_metrics, run_id_of, saved_by
from relax_cli.preflight.plan import optimizer_steps
from relax_cli.preflight.rules.folders import same_folder, unused_name

declare = problem_kinds("Folders and checkpoints", option="--num-rollout")
LORA_WEIGHTS = declare(
    "lora-weights-only",
    "A run with low-rank adapters would start from bare weights of a checkpoint, or a critic from the checkpoint of an "
    "actor that has adapters only.",
    option="--load",
)
NOTHING_LEFT = declare("resume-nothing-left", "The checkpoint has more rollouts than `--num-rollout`.")
REFERENCE_NOT_START = declare(
    "reference-not-start",
    "A warning: a run that starts from bare weights compares its KL terms with `--hf-checkpoint`, as no `--ref-load` "
    "is given.",
    option="--ref-load",
    severity="warning",
)
OTHER_SCHEDULE = declare(
    "resume-other-schedule",
    "A warning: the learning rate decays over `--num-rollout`, which is not what it was when the checkpoint was saved. "
    "The next step's rate is given for both. The rates of the steps already taken stay as they were.",
    severity="warning",
)


def examine_run(config: Config, *, has_critic: bool, num_rollout: int | None = None) -> ResumeReport:
    """Where the run of a configuration starts, and whether what it would load belongs to it. `num_rollout` is for runs
    without `--num-rollout`."""
    section = config.checkpoint
    report = examine_resume(
        section.load,
        config.critic.critic_load,
        has_critic=has_critic,
        critic_init_from_actor=config.critic.critic_init_from_actor,
        save=section.save,
        critic_save=config.critic.critic_save,
    )
    report = report.refused(list(_weights_for_adapters(report, config)))
    report = report.refused(list(_other_run(config, report)))
    if report.decision.verdict == "weights-only":
        return _with(report, list(_new_run_problems(config)), config)
    if report.decision.verdict != "resume":
        return report
    report = _with(report, _differences(report, config), config)
    last, iteration = num_rollout or config.batch.num_rollout, report.sides[0].iteration
    report = report.refused(list(_other_schedule(config, report.sides[0], last, has_critic=has_critic)))
    if last is None or iteration is None or iteration <= last:
        return report
    message = f"nothing is left to do: the checkpoint has finished {iteration} rollouts"
    fix = f"--num-rollout with a number above {iteration}; the learning-rate schedule stretches to it"
    where, expected = str(report.sides[0].checkpoint), f"at least {iteration}"
    return report.refused([NOTHING_LEFT(message, fix=fix, where=where, got=str(last), expected=expected)])


def _weights_for_adapters(report: ResumeReport, config: Config) -> Iterator[Problem]:
    """Weights without a run's state that cannot be taken: there are none in a checkpoint of adapters, and adapters are
    trained on those of `--hf-checkpoint`."""
    actor = report.sides[0]
    for role, source in (("actor", report.decision.actor), ("critic", report.decision.critic)):
        if source is None or not source.weights_only:
            continue
        if source.folder == actor.checkpoint and actor.meta is not None and adapters_in(actor.meta) is not None:
            words = ["relax", "checkpoint", "export-hf", str(actor.folder), "NEW_DIR"]
            export = shlex.join([*words, "--hf-checkpoint", config.model.hf_checkpoint])
            message = f"the {role} would take its weights from a checkpoint that has adapters only"
            fix = f"{export}, then begin a new run with --hf-checkpoint NEW_DIR"
            where, expected = str(source.folder), "the weights of a whole model"
            yield LORA_WEIGHTS(message, fix=fix, where=where, got="adapters", expected=expected)
        elif lora_of(config, role) is not None:
            yield LORA_WEIGHTS(
                f"the {role}'s adapters are trained on the weights of --hf-checkpoint, not on those of a checkpoint",
                where=str(source.folder),
                got="weights without the state of a run",
                expected="no --load, or the checkpoint of a run with adapters",
                fix="--critic-lora-rank 0" if role == "critic" else "--lora-rank 0",
            )


def decide_run(config: Config, *, has_critic: bool) -> ResumeReport:
    """`examine_run` for a run that is about to be launched, whose `--num-rollout` is known.
    Raises ResumeError: it is refused, with every problem."""
    report = examine_run(config, has_critic=has_critic)
    if report.problems:
        raise ResumeError(report.problems)
    return report


def _differences(report: ResumeReport, config: Config) -> list[Problem]:
    """What sets the checkpoints that would be resumed apart from the run; once, though both sides of a pair say it."""
    run, found = identify(config, folder_of_model(config.model.hf_checkpoint)), dict[str, Problem]()
    for side in report.sides:
        if side.meta is not None and side.checkpoint is not None:
            for problem in differences(config, run, side.meta, side.checkpoint):
                found.setdefault(problem.id, problem)
    return list(found.values())


def _other_run(config: Config, report: ResumeReport) -> Iterator[Problem]:
    """A run folder of another run: its steps would pass for those of this one, or be dropped."""
    run_dir, meta, section = config.run.run_dir, report.sides[0].meta, config.checkpoint
    if run_dir is None:
        return
    got, expected = None, None
    if report.decision.verdict == "resume":
        got, expected = run_id_of(Path(run_dir)), None if meta is None else meta.extra.get("run_id")
    elif report.decision.verdict == "cold-start" and section.load is not None and has_metrics(Path(run_dir)):
        got, expected = saved_by(Path(run_dir)), section.save
    if got and expected and got != expected and not same_folder(got, expected):
        yield RUN_DIR_IN_USE(
            "the run folder has the steps of another run",
            where=run_dir,
            got=f"of {got}",
            expected=f"a new folder, or that of {expected}",
            fix=f"--run-dir {shlex.quote(unused_name(run_dir))}",
        )


def schedule_of(config: Config) -> dict[str, Any]:
    """What a checkpoint says of the run's learning-rate schedule."""
    return {"decay": config.optimizer.lr_decay_style, "rollouts": config.batch.num_rollout}


def _other_schedule(config: Config, actor: Side, rollouts: int | None, *, has_critic: bool) -> Iterator[Problem]:
    """A decay over another number of rollouts than before: what becomes of the rate. No error under `--strict`, where
    the command that resumes with more rollouts must stay valid."""
    saved = actor.meta.extra.get("schedule") if actor.meta is not None else None
    section, iteration = config.optimizer, actor.iteration
    if section.lr_decay_style == "constant" or not isinstance(saved, dict) or rollouts is None or iteration is None:
        return
    before = saved.get("rollouts")
    if saved.get("decay") != section.lr_decay_style or not isinstance(before, int) or before == rollouts:
        return
    resting = config.critic.num_critic_only_steps if has_critic else 0
    taken = max(0, iteration - resting) * config.batch.steps_per_rollout

    def rate(total: int) -> str:
        steps, _ = optimizer_steps(config, total, has_critic=has_critic)
        return f"{Schedule(section, section.lr, section.lr_warmup_iters, steps).rate(taken):.3g}"

    keeps = f"--num-rollout {before} keeps the schedule"
    yield OTHER_SCHEDULE(
        f"the learning rate decays over {rollouts} rollouts now, over {before} when the checkpoint was saved",
        where=str(actor.checkpoint),
        got=f"the actor's next step has rate {rate(rollouts)}",
        expected=f"{rate(before)} on the schedule of before",
        fix=keeps if iteration < before else "accept it, or --lr-decay-style constant with the --lr to continue at",
    )


def _with(report: ResumeReport, problems: Sequence[Problem], config: Config) -> ResumeReport:
    """The report with further problems; `--strict` makes errors of warnings."""
    return report.refused([replace(p, severity="error") for p in problems] if config.run.strict else problems)


def _new_run_problems(config: Config) -> Iterator[Problem]:
    """A run that starts at 0 from weights is a new run: it needs folders without another run's results."""
    places = {"--save": config.checkpoint.save, "--critic-save": config.critic.critic_save}
    for option, folder in places.items():
        if folder is not None and layout.list_iterations(Path(folder)):
            message = f"the run starts at step 1, and the folder of {option} contains other checkpoints"
            fix, expected = f"{option} {shlex.quote(unused_name(folder))}", "a folder without checkpoints"
            yield SAVE_IN_USE(message, fix=fix, option=option, got=folder, expected=expected)
    model = config.model.hf_checkpoint
    if config.algorithm.needs_reference and config.model.ref_load is None:
        yield REFERENCE_NOT_START(
            "KL terms compare with the model of --hf-checkpoint, not with the weights that the run starts from",
            got=f"unset, so {model}",
            expected="the model to compare with, named",
            fix=f"--ref-load {shlex.quote(model)}, if this is meant; or the folder of the model that was converted",
        )
    run_dir = config.run.run_dir
    if run_dir is not None and has_metrics(Path(run_dir)):
        message = "the run starts at step 1, and the run folder already contains a run"
        fix = f"--run-dir {shlex.quote(unused_name(run_dir))}"
        yield RUN_DIR_IN_USE(message, fix=fix, got=run_dir, expected="a new or empty folder")
