"""Points the trackers of an actor and a critic at one iteration again. Deletes nothing."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from relax_cli.checkpoint import layout
from relax_cli.checkpoint.side import NO_CHECKPOINT, Side, not_a_save_folder, with_state
from relax_cli.errors import ConfigError, ResumeError, problem_kinds

declare = problem_kinds("Folders and checkpoints")
FOLDER_MISSING = declare(
    "checkpoint-folder-missing", "A command of `relax checkpoint` was given a folder that does not exist."
)
ONE_FOLDER = declare(
    "align-one-folder", "`relax checkpoint align` needs the actor's folder and the critic's.", option="--critic-load"
)
NOTHING_COMMON = declare(
    "align-nothing-common",
    "No iteration is complete in both folders and of one run, so there is nothing to point the trackers at.",
    option="--load and --critic-load",
)


@dataclass(frozen=True)
class Alignment:
    """The newest iteration that both can resume from, and what leads there."""

    iteration: int
    trackers: dict[str, tuple[Path, layout.Tracker]]
    """Save folder and present tracker of each role."""
    left_out: dict[int, str]
    """Iterations that are newer than the chosen one, and why each is not it."""

    @property
    def changes(self) -> bool:
        """Whether a tracker does not say so already."""
        return any(tracker.iteration != self.iteration for _, tracker in self.trackers.values())


def plan_alignment(actor: Path, critic: Path, *, deep: bool = False) -> Alignment:
    """Find the newest iteration that is complete in both folders and was saved by one run as a pair.
    Raises ConfigError: a folder does not exist, or both are the same; ResumeError: there is no such iteration."""
    require_save_folder("--load", actor)
    require_save_folder("--critic-load", critic, "critic")
    if actor.resolve() == critic.resolve():
        problem = ONE_FOLDER(
            "actor and critic are saved to two folders, and one was given for both",
            fix="--load ACTOR_DIR --critic-load CRITIC_DIR",
            got=str(critic),
            expected="the folder that --critic-save named",
        )
        raise ConfigError(problem)
    left_out: dict[int, str] = {}
    for iteration in sorted({*layout.list_iterations(actor), *layout.list_iterations(critic)}, reverse=True):
        reason = why_no_pair(actor, critic, iteration, deep=deep)
        if reason is None:
            folders = {"actor": actor, "critic": critic}
            trackers = {role: (folder, layout.read_tracker(folder)) for role, folder in folders.items()}
            return Alignment(iteration, trackers, left_out)
        left_out[iteration] = reason
    shown = "; ".join(f"{iteration}: {reason}" for iteration, reason in [*left_out.items()][:4])
    problem = NOTHING_COMMON(
        "no iteration is complete in both folders",
        fix="start again without --load, or resume from copies of both folders",
        where=f"{actor} and {critic}",
        got=shown or "no checkpoints",
        expected="an iteration that one run saved into both",
    )
    raise ResumeError(problem)


def apply(alignment: Alignment) -> None:
    """Write the trackers, each in one atomic step.
    Raises OSError: the disk refused; what was written until then stays."""
    for folder, tracker in alignment.trackers.values():
        if tracker.iteration != alignment.iteration:
            layout.write_tracker(folder, alignment.iteration)


def settle(save_dir: Path, iteration: int | None) -> None:
    """Finish what a run was killed in: unfinished folders go, and the tracker moves to `iteration`.
    Raises OSError: the disk refused."""
    layout.remove_leftovers(save_dir)
    if iteration is not None and layout.read_tracker(save_dir).iteration != iteration:
        layout.write_tracker(save_dir, iteration)


def resumable(actor: Path, critic: Path | None = None, role: str = "actor", *, deep: bool = False) -> Iterator[int]:
    """Iterations that a pair can resume from, or the one role in `actor` alone; newest first."""
    for iteration in reversed(layout.list_iterations(actor)):
        if critic is None:
            reason = why_unusable(actor, iteration, role, deep=deep)
        else:
            reason = why_no_pair(actor, critic, iteration, deep=deep)
        if reason is None:
            yield iteration


def go_back(iteration: int, actor: Path, critic: Path | None, *, deep: bool = False) -> str:
    """The command that lets an iteration count."""
    if critic is None:
        return f"echo {iteration} > {shlex.quote(str(actor / layout.TRACKER_FILE))}"
    folders = shlex.join(["--load", str(actor), "--critic-load", str(critic)])
    return f"relax checkpoint align {folders}{' --deep' if deep else ''} --yes"


def why_no_pair(actor: Path, critic: Path, iteration: int, *, deep: bool = False) -> str | None:
    """Why actor and critic cannot both resume from `iteration`; None when they can."""
    for role, folder in (("actor", actor), ("critic", critic)):
        if (reason := why_unusable(folder, iteration, role, deep=deep)) is not None:
            return reason
    saves = {layout.read_meta(layout.iteration_folder(folder, iteration)).save for folder in (actor, critic)}
    return None if len(saves) == 1 else "actor and critic were saved by different runs"


def why_unusable(folder: Path, iteration: int, role: str, *, deep: bool = False) -> str | None:
    """Why a role cannot resume from a checkpoint in its save folder; None when it can."""
    checkpoint = layout.iteration_folder(folder, iteration)
    if not checkpoint.is_dir():
        return f"the {role} has none"
    side = with_state(Side(role, "", folder, iteration), checkpoint, deep)
    if side.problem is None:
        return None
    if side.meta is not None and side.meta.role != role:
        return f"the {role}'s folder contains a checkpoint of the {side.meta.role}"
    return f"the {role}'s is damaged: {side.problem.got}"


def require_save_folder(option: str, folder: Path, role: str = "actor") -> None:
    """Raises ConfigError where there is no such folder, ResumeError where it is something else."""
    if not folder.is_dir():
        problem = FOLDER_MISSING(
            f"{option} leads to no folder",
            fix="give the folder that --save or --critic-save named",
            option=option,
            got=str(folder),
            expected="a save folder",
        )
        raise ConfigError(problem)
    if layout.read_tracker(folder) == layout.Tracker(None) and not layout.list_iterations(folder):
        problem = not_a_save_folder(option, folder, role)
        if problem.got != NO_CHECKPOINT:
            raise ResumeError(problem)
