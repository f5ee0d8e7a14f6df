"""Chooses which checkpoints of a save folder, or of a pair of them, can go, and removes them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_cli.checkpoint import layout
from relax_cli.checkpoint.align import go_back, require_save_folder, resumable, why_unusable
from relax_cli.checkpoint.resume import critic_folder
from relax_cli.errors import ConfigError, ResumeError, problem_kinds

declare = problem_kinds("Folders and checkpoints")
TRACKER_UNREADABLE = declare("prune-tracker-unreadable", "Nothing says which checkpoint counts, so nothing is removed.")
HALF_A_PAIR = declare(
    "prune-half-a-pair",
    "The run has an actor and a critic. Pruned alone, one of them could leave no pair to resume from.",
)
NOTHING_COMPLETE = declare(
    "prune-nothing-complete", "There is no complete checkpoint, or no complete pair, so nothing is removed."
)


@dataclass(frozen=True)
class Entry:
    """One checkpoint, or what an interrupted save left of one."""

    role: str
    path: Path
    bytes: int
    """On the disk."""
    keep: bool
    reason: str


def plan_pruning(actor: Path, critic: Path | None, keep: int) -> list[Entry]:
    """What stays and what goes, in the order in which it goes: the newest `keep` complete checkpoints stay, or pairs
    where a critic is given, and what a tracker names. Without `critic` any role may be in `actor`.
    Raises ConfigError: a folder does not exist, or the other half of a pair was not given; ResumeError: a tracker
    cannot be understood, or nothing complete would be left."""
    require_save_folder("DIR", actor)
    if critic is not None:
        require_save_folder("--critic", critic, "critic")
    role = _refuse_half_a_pair(actor, keep) if critic is None else "actor"
    sides = {role: actor} | ({"critic": critic} if critic is not None else {})
    complete = sorted(resumable(actor, critic, role))
    if not complete:
        both = " in both folders" if critic else ""
        problem = NOTHING_COMPLETE(
            f"no iteration is complete{both}, so nothing is removed",
            fix=f"relax checkpoint list {shlex.quote(str(critic or actor))} says what each one lacks",
            where=" and ".join(map(str, sides.values())),
            expected="a checkpoint to resume from after pruning",
        )
        raise ResumeError(problem)
    stay = dict.fromkeys(complete[-keep:], f"of the newest {keep} complete" + (" pairs" if critic else ""))
    for folder in sides.values():
        stay |= _named_by(folder, go_back(complete[-1], actor, critic))
    return [entry for role, folder in sides.items() for entry in _entries(role, folder, complete, stay)]


def apply(entries: Sequence[Entry]) -> None:
    """Remove what goes, oldest first; each loses its name before its files.
    Raises OSError: the disk refused; what is left is found by the next call."""
    for entry in entries:
        if not entry.keep:
            layout.remove_checkpoint(entry.path)


def size_of(path: Path) -> int:
    """Bytes of the files below `path`, links not followed."""
    if path.is_symlink() or path.is_file():
        return path.lstat().st_size
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() or file.is_symlink())


def _named_by(folder: Path, fix: str) -> dict[int, str]:
    """Iterations that one folder cannot lose: what its tracker names, its newest complete checkpoint, and its best.
    Raises ResumeError: the tracker cannot be understood; `fix` is what to do then."""
    tracker = layout.read_tracker(folder)
    if tracker.problem is not None:
        problem = TRACKER_UNREADABLE(
            "the tracker cannot be understood, so nothing says which checkpoint counts",
            fix=fix,
            where=str(folder / layout.TRACKER_FILE),
            got=tracker.problem,
        )
        raise ResumeError(problem)
    named = dict.fromkeys(layout.complete_iterations(folder)[-1:], "the newest complete one here")
    if (best := layout.read_best(folder)) is not None:
        named[best.iteration] = f"the best by {best.metric}"
    return named | ({tracker.iteration: "a tracker names it"} if isinstance(tracker.iteration, int) else {})


def _entries(role: str, folder: Path, complete: Sequence[int], stay: dict[int, str]) -> list[Entry]:
    entries = []
    for iteration in layout.list_iterations(folder):
        path = layout.iteration_folder(folder, iteration)
        reason = stay.get(iteration) or why_unusable(folder, iteration, role)
        reason = reason or ("older" if iteration in complete else "its other half is missing or broken")
        entries.append(Entry(role, path, size_of(path), iteration in stay, reason))
    left = "left by an interrupted save"
    return [*(Entry(role, path, size_of(path), False, left) for path in layout.list_leftovers(folder)), *entries]


def _refuse_half_a_pair(folder: Path, keep: int) -> str:
    """The role of a save folder whose run saved no other.
    Raises ConfigError: pruning it alone could leave a pair without its other half."""
    for iteration in reversed(layout.list_iterations(folder)):
        try:
            meta = layout.read_meta(layout.iteration_folder(folder, iteration))
        except ResumeError:
            continue
        is_critic = meta.role == "critic"
        if not is_critic and not meta.extra.get("has_critic", False):
            return meta.role
        actor = "ACTOR_DIR" if is_critic else str(folder)
        critic = str(folder) if is_critic else str(critic_folder(folder, meta) or "CRITIC_DIR")
        problem = HALF_A_PAIR(
            f"these are the checkpoints of {'a critic' if is_critic else 'an actor with a critic'}: "
            "pruned alone, they could leave no pair",
            fix=shlex.join(["relax", "checkpoint", "prune", actor, "--critic", critic, "--keep", str(keep)]),
            option="DIR" if is_critic else "--critic",
            got=str(folder),
            expected="the save folders of actor and critic",
        )
        raise ConfigError(problem)
    return "actor"
