"""Where a run starts: one decision from the folders given, before anything is launched.

| actor (`--load`) | critic (`--critic-load`, follows `--load`) | verdict |
|---|---|---|
| none | none | cold start of both |
| N | N | resume at N |
| N | M ≠ N, or none | refuse: one side would restart |
| unreadable tracker, missing or incomplete folder, another role's checkpoint | | refuse, say what is there |
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from relax_cli.checkpoint import layout
from relax_cli.errors import Problem, ResumeError


@dataclass(frozen=True)
class ResumeDecision:
    """What the roles load."""

    verdict: Literal["cold-start", "resume", "refuse"]
    iteration: int | None = None
    """Finished rollouts; also the id of the next one."""
    actor: Path | None = None
    critic: Path | None = None


@dataclass(frozen=True)
class Side:
    """What one role's folder offers."""

    role: str
    option: str
    folder: Path | None
    iteration: int | None
    problem: Problem | None


@dataclass(frozen=True)
class ResumeReport:
    """The decision and what it rests on."""

    decision: ResumeDecision
    sides: tuple[Side, ...]
    problems: tuple[Problem, ...]


def decide_resume(load: str | None, critic_load: str | None, *, has_critic: bool) -> ResumeDecision:
    """The decision for a run with these options; a folder without a tracker counts as no checkpoint.

    Raises:
        ResumeError: the checkpoints do not fit together, or cannot be read; holds every problem.
    """
    report = examine_resume(load, critic_load, has_critic=has_critic)
    if report.problems:
        raise ResumeError(report.problems)
    return report.decision


def examine_resume(load: str | None, critic_load: str | None, *, has_critic: bool, deep: bool = False) -> ResumeReport:
    """The same without raising.

    Args:
        deep: compare the hash of every file, too.
    """
    sides = [inspect("actor", "--load", load, deep=deep)]
    if has_critic:
        option = "--critic-load" if critic_load else "--load"
        sides.append(inspect("critic", option, critic_load or load, deep=deep))
    problems = [side.problem for side in sides if side.problem is not None]
    if not problems and len({side.iteration for side in sides}) > 1:
        problems.append(_mismatch(*sides))
    iteration = sides[0].iteration
    if problems:
        decision = ResumeDecision("refuse")
    elif iteration is None:
        decision = ResumeDecision("cold-start")
    else:
        folders = {s.role: layout.iteration_folder(s.folder, iteration) for s in sides if s.folder is not None}
        decision = ResumeDecision("resume", iteration, folders["actor"], folders.get("critic"))
    return ResumeReport(decision, tuple(sides), tuple(problems))


def was_saved_beside_a_critic(load: str) -> bool:
    """Whether the newest checkpoint in the folder says that its run had a critic; False where nothing can be read."""
    tracker = layout.read_tracker(Path(load))
    if not isinstance(tracker.iteration, int):
        return False
    try:
        meta = layout.read_meta(layout.iteration_folder(Path(load), tracker.iteration))
    except ResumeError:
        return False
    return bool(meta.extra.get("has_critic", False))


def inspect(role: str, option: str, folder: str | None, *, deep: bool = False) -> Side:
    """Read tracker and `relax.json` of one role."""
    if folder is None:
        return Side(role, option, None, None, None)
    path = Path(folder)
    tracker = layout.read_tracker(path)
    if tracker.problem is not None:
        return Side(role, option, path, None, _unusable(option, path, tracker.problem))
    if tracker.iteration == "release":
        reason = "it holds bare weights (`release`), which training cannot start from yet"
        return Side(role, option, path, None, _unusable(option, path, reason))
    if tracker.iteration is None:
        return Side(role, option, path, None, None)
    return Side(role, option, path, tracker.iteration, _damage(role, option, path, tracker.iteration, deep))


def _damage(role: str, option: str, folder: Path, iteration: int, deep: bool) -> Problem | None:
    """Why the checkpoint that the tracker names cannot be loaded as `role`'s; None when it can."""
    checkpoint = layout.iteration_folder(folder, iteration)
    if not checkpoint.is_dir():
        return _unusable(option, folder, f"the tracker names iteration {iteration}, but {checkpoint.name} is missing")
    try:
        meta, found = layout.read_meta(checkpoint), layout.damages(checkpoint, deep=deep)
    except ResumeError as error:
        return error.problems[0]
    if meta.role != role:
        return Problem(
            id="resume-wrong-role",
            message=f"{option} leads to a checkpoint of the {meta.role}, where the {role}'s is needed",
            option=option,
            where=str(checkpoint),
            got=f"role {meta.role}",
            expected=f"role {role}",
            fix="--load takes the actor's save folder, --critic-load the critic's",
        )
    return _unusable(option, checkpoint, found[0]) if found else None


def _unusable(option: str, where: Path, reason: str) -> Problem:
    return Problem(
        id="resume-unreadable",
        message=f"cannot resume: {reason}",
        option=option,
        where=str(where),
        got=reason,
        expected="a folder with a readable tracker and the complete checkpoint it names",
        fix=f"write an older complete iteration into {layout.TRACKER_FILE}, in both folders of the pair",
    )


def _mismatch(actor: Side, critic: Side) -> Problem:
    common = sorted(_complete(actor) & _complete(critic))
    fix = (
        f"write {common[-1]} into {layout.TRACKER_FILE} of both folders: the newest iteration complete in both"
        if common
        else "start anew without --load, or give the folders of one pair: --load ACTOR_DIR --critic-load CRITIC_DIR"
    )
    return Problem(
        id="resume-pair-mismatch",
        message="actor and critic would resume from different iterations",
        option=critic.option,
        where=" and ".join(str(side.folder or "(not given)") for side in (actor, critic)),
        got=f"actor {_shown(actor)}, critic {_shown(critic)}",
        expected="the same iteration of both",
        fix=fix,
    )


def _complete(side: Side) -> set[int]:
    if side.folder is None:
        return set()
    folder = side.folder
    return {i for i in layout.list_iterations(folder) if layout.is_complete(layout.iteration_folder(folder, i))}


def _shown(side: Side) -> str:
    return "no checkpoint" if side.iteration is None else f"iteration {side.iteration}"
