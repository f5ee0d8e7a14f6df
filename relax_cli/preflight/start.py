"""Where the run of a configuration starts, and whether what it would load belongs to it.

The one function behind `train` and `validate-config`; `check-resume` asks `resume.examine_resume`, which it builds on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from relax_cli.checkpoint import layout
from relax_cli.checkpoint import resume_problems as problems_of
from relax_cli.checkpoint.fingerprint import RunIdentity, differences, folder_of_model, identify
from relax_cli.checkpoint.resume import ResumeReport, examine_resume
from relax_cli.config.schema import Config
from relax_cli.errors import Problem, ResumeError
from relax_cli.preflight.completion import has_metrics


def examine_run(config: Config, *, has_critic: bool, num_rollout: int | None = None) -> ResumeReport:
    """Where the run of a configuration starts, and whether what it would load belongs to it.

    Args:
        num_rollout: rollouts of the run; `--num-rollout` when None.
    """
    section = config.checkpoint
    report = examine_resume(
        section.load,
        config.critic.critic_load,
        has_critic=has_critic,
        critic_init_from_actor=config.critic.critic_init_from_actor,
        save=section.save,
        critic_save=config.critic.critic_save,
    )
    if report.decision.verdict == "weights-only":
        return _with(report, _new_run_problems(config), config)
    if report.decision.verdict != "resume":
        return report
    run = identify(config, folder_of_model(config.model.hf_checkpoint))
    report = _with(report, compare(report, run), config)
    last, iteration = num_rollout or config.batch.num_rollout, report.sides[0].iteration
    if last is None or iteration is None or iteration <= last:
        return report
    return report.refused([problems_of.nothing_left(report.sides[0].checkpoint, iteration, last)])


def decide_run(config: Config, *, has_critic: bool) -> ResumeReport:
    """`examine_run` for a run that is about to be launched, whose `--num-rollout` is known.

    Raises:
        ResumeError: it is refused; holds every problem.
    """
    report = examine_run(config, has_critic=has_critic)
    if report.problems:
        raise ResumeError(report.problems)
    return report


def compare(report: ResumeReport, run: RunIdentity) -> list[Problem]:
    """What sets the checkpoints that would be resumed apart from `run`; once, though both sides of a pair say it."""
    found: dict[str, Problem] = {}
    for side in report.sides:
        if side.meta is not None and side.checkpoint is not None:
            for problem in differences(run, side.meta, side.checkpoint):
                found.setdefault(problem.id, problem)
    return list(found.values())


def _with(report: ResumeReport, problems: Sequence[Problem], config: Config) -> ResumeReport:
    """The report with further problems; `--strict` makes errors of warnings."""
    return report.refused([replace(p, severity="error") for p in problems] if config.run.strict else problems)


def _new_run_problems(config: Config) -> list[Problem]:
    """A run that starts at 0 from weights is a new run: it needs folders without another run's results."""
    places = {"--save": config.checkpoint.save, "--critic-save": config.critic.critic_save}
    found = [
        problems_of.would_overwrite(option, folder)
        for option, folder in places.items()
        if folder is not None and layout.list_iterations(Path(folder))
    ]
    if config.algorithm.needs_reference and config.model.ref_load is None:
        found.append(problems_of.other_reference(config.model.hf_checkpoint))
    run_dir = config.run.run_dir
    if run_dir is not None and has_metrics(Path(run_dir)):
        found.append(problems_of.run_dir_in_use(run_dir))
    return found
