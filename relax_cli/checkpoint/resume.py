"""Where a run starts: one decision from the folders given, before anything is launched.

| actor (`--load`) | critic (`--critic-load`, follows `--load`) | verdict |
|---|---|---|
| none, or the new `--save` folder | the same | cold start of both |
| N | N | resume at N |
| N | M ≠ N, or none | refuse: one side would restart; but see `_as_a_pair` |
| none | N | refuse: one side would restart |
| weights only: `release`, or Megatron's files without `relax.json` | the same, or its own | start at 0 from them |
| N | the actor's folder | refuse: the critic's training would be lost; `--critic-init-from-actor` allows it |
| N of another model, tokenizer, data set or estimator, or the run's last iteration | | refuse |
| unreadable tracker, missing or incomplete checkpoint, another role's checkpoint | | refuse, say why |
| no such folder, or no save folder, and not the `--save` folder of the same side | | refuse, say what it is |
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from relax_cli.checkpoint import align, layout
from relax_cli.checkpoint import resume_problems as problems_of
from relax_cli.checkpoint.layout import CheckpointMeta
from relax_cli.errors import Problem, ResumeError
from relax_cli.plugin.launch_plan import LoadFrom

GO_BACK = frozenset({"resume-unreadable", "checkpoint-meta-unreadable", "resume-pair-mismatch"})
"""Problems that an older iteration does not have."""
MISTYPED = frozenset({"resume-wrong-role", "resume-folder-missing", "resume-not-a-save-folder"})
"""Problems of the command, not of a critic's state."""
RELEASE = "release"
"""Tracker text, and folder, of weights that no run counted."""


@dataclass(frozen=True)
class ResumeDecision:
    """What the roles load."""

    verdict: Literal["cold-start", "resume", "weights-only", "refuse"]
    iteration: int | None = None
    """Finished rollouts, and the id of the next one; None where the run starts at 0."""
    actor: LoadFrom | None = None
    critic: LoadFrom | None = None

    @property
    def text(self) -> str:
        """One sentence for a person."""
        if self.verdict == "refuse":
            return "refuse: see the errors"
        if self.verdict == "cold-start":
            return "cold start: there is no checkpoint, so the run starts at step 1"
        assert self.actor is not None
        next_step = (self.iteration or 0) + 1
        if self.verdict == "weights-only":
            words = f"weights only: the run starts at step 1 from {self.actor.folder}, with new optimizers"
            if self.critic is None:
                return words
            source = "the same weights" if self.critic == self.actor else f"those of {self.critic.folder}"
            return f"{words}; the critic takes {source} and a new value head"
        if self.critic is None or self.critic.weights_only:
            words = f"resume: the actor continues with step {next_step}"
            fresh = "; the critic starts from the actor's backbone, a new value head and a new optimizer"
            return words if self.critic is None else words + fresh
        return f"resume: both continue with step {next_step}"


@dataclass(frozen=True)
class Side:
    """What one role's folder offers."""

    role: str
    option: str
    """That named the folder: `--critic-load` follows `--load`."""
    folder: Path | None
    iteration: int | None
    """None where there is no checkpoint, or only weights."""
    problem: Problem | None
    checkpoint: Path | None = None
    """Folder of the one checkpoint that the tracker names, where it is there."""
    meta: CheckpointMeta | None = None
    """Its `relax.json`; None for weights, or where it cannot be used."""

    @property
    def weights_only(self) -> bool:
        """Whether there are weights without the state of a run."""
        return self.problem is None and self.checkpoint is not None and self.meta is None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to load, and nothing wrong."""
        return self.problem is None and self.checkpoint is None


@dataclass(frozen=True)
class ResumeReport:
    """The decision and what it rests on."""

    decision: ResumeDecision
    sides: tuple[Side, ...]
    problems: tuple[Problem, ...]
    """Why it is refused."""
    warnings: tuple[Problem, ...] = ()

    @property
    def prompts_seen(self) -> int | None:
        """Prompts that the run to resume has drawn; None for a new run, or where the checkpoint does not say."""
        metas = [side.meta for side in self.sides if side.meta is not None] if self.decision.iteration else []
        return metas[0].extra.get("data_position", {}).get("prompts_seen") if metas else None

    def notes(self, *given: str | None) -> list[str]:
        """What a person should know as the run begins; nothing where no folder was `given`."""
        if not any(given):
            return []
        return [self.decision.text, *(f"warning: {p.message} ({p.got}; {p.expected})" for p in self.warnings)]

    def refused(self, problems: Sequence[Problem]) -> ResumeReport:
        """The same with further problems; errors turn the decision."""
        errors = tuple(p for p in problems if p.severity == "error")
        return replace(
            self,
            decision=ResumeDecision("refuse") if errors else self.decision,
            problems=(*self.problems, *errors),
            warnings=(*self.warnings, *(p for p in problems if p.severity == "warning")),
        )


def examine_resume(
    load: str | None,
    critic_load: str | None,
    *,
    has_critic: bool,
    critic_init_from_actor: bool = False,
    deep: bool = False,
    save: str | None = None,
    critic_save: str | None = None,
) -> ResumeReport:
    """The decision from the folders alone, and what it rests on.

    Args:
        critic_init_from_actor: where the critic has no state of its own, the actor's backbone may stand in.
        deep: compare the hash of every file as well.
        save: the folder that the run saves the actor to: it may be new, so that one script restarts itself.
        critic_save: the same of the critic.
    """
    actor = inspect("actor", "--load", load, deep=deep, may_be_new=_is_same(load, save))
    sides = [actor]
    if has_critic:
        option = "--critic-load" if critic_load else "--load"
        new = critic_load is None or _is_same(critic_load, critic_save)
        critic = inspect("critic", option, critic_load or load, deep=deep, may_be_new=new)
        if critic_load is None and actor.problem is not None and actor.problem.id == "resume-not-a-save-folder":
            critic = replace(critic, problem=None)  # Said once, of the actor.
        sides.append(replace(critic, problem=_loss(actor, critic) or critic.problem))
        sides = list(_as_a_pair(*sides, deep=deep))
    decision, problems = _decide(sides[0], sides[1] if has_critic else None, critic_init_from_actor)
    return ResumeReport(decision, tuple(sides), tuple(_with_way_back(problems, *sides, deep=deep)))


def was_saved_beside_a_critic(load: str) -> bool:
    """Whether the newest checkpoint in the folder says that its run had a critic; False where nothing can be read."""
    meta = inspect("actor", "--load", load).meta
    return meta is not None and bool(meta.extra.get("has_critic", False))


def inspect(role: str, option: str, folder: str | None, *, deep: bool = False, may_be_new: bool = True) -> Side:
    """Read tracker and `relax.json` of one role.

    Args:
        may_be_new: the folder may be missing, or empty.
    """
    if folder is None:
        return Side(role, option, None, None, None)
    path = Path(folder)
    side = Side(role, option, path, None, None)
    try:
        return _inspect(side, path, deep, may_be_new)
    except OSError as error:
        return replace(side, problem=problems_of.unusable(option, path, f"{error.strerror}: {error.filename}"))


def _inspect(side: Side, path: Path, deep: bool, may_be_new: bool) -> Side:
    if path.exists() and not path.is_dir():
        return replace(side, problem=problems_of.not_a_save_folder(side.option, path, side.role))
    tracker = layout.read_tracker(path)
    if tracker.problem is not None:
        return replace(side, problem=problems_of.unusable(side.option, path, tracker.problem))
    if tracker.iteration is None:
        return replace(side, problem=_nothing_there(side, path, may_be_new))
    iteration = tracker.iteration if isinstance(tracker.iteration, int) else None
    checkpoint = path / RELEASE if iteration is None else layout.iteration_folder(path, iteration)
    side = replace(side, iteration=iteration)
    if not checkpoint.is_dir():
        named = f"iteration {iteration}" if iteration is not None else f"`{RELEASE}`"
        missing = f"the tracker names {named}, but {checkpoint.name} is missing"
        return replace(side, problem=problems_of.unusable(side.option, path, missing))
    side = replace(side, checkpoint=checkpoint)
    if not (checkpoint / layout.META_FILE).exists() and not _is_ours(path):
        reason = layout_of_weights(checkpoint)
        problem = None if reason is None else problems_of.unusable(side.option, checkpoint, reason)
        return replace(side, iteration=None, problem=problem)
    return _with_state(side, checkpoint, deep)


def _nothing_there(side: Side, path: Path, may_be_new: bool) -> Problem | None:
    """The problem of a folder without a tracker; None where the run starts from nothing."""
    if may_be_new and not problems_of.is_one_checkpoint(path):
        return None
    if not path.exists():
        return problems_of.folder_missing(side.option, path)
    return problems_of.not_a_save_folder(side.option, path, side.role)


def _is_same(folder: str | None, other: str | None) -> bool:
    return folder is not None and other is not None and os.path.realpath(folder) == os.path.realpath(other)


def _with_state(side: Side, checkpoint: Path, deep: bool) -> Side:
    """The side with `relax.json` of its checkpoint, or with the reason why it cannot be loaded as this role's."""
    try:
        meta, found = layout.read_meta(checkpoint), layout.damages(checkpoint, deep=deep)
    except ResumeError as error:
        return replace(side, problem=error.problems[0])
    if meta.iteration != side.iteration:
        found = [f"{layout.META_FILE} says iteration {meta.iteration}", *found]
    if meta.role != side.role:
        wrong = problems_of.wrong_role(side.role, side.option, checkpoint, meta.role)
        return replace(side, meta=meta, problem=wrong)
    problem = problems_of.unusable(side.option, checkpoint, found[0]) if found else None
    return replace(side, meta=meta, problem=problem)


def _is_ours(save_dir: Path) -> bool:
    """Whether relax has written to the folder: then a missing `relax.json` is damage."""
    return any(
        (layout.iteration_folder(save_dir, i) / layout.META_FILE).exists() for i in layout.list_iterations(save_dir)
    )


def layout_of_weights(checkpoint: Path) -> str | None:
    """Why a folder without `relax.json` is not a sharded checkpoint of Megatron's; None when it is one."""
    for name in (".metadata", "metadata.json"):
        if not (checkpoint / name).is_file():
            return f"{checkpoint.name} has neither {layout.META_FILE} nor {name} of a sharded Megatron checkpoint"
    if not any(checkpoint.glob("*.distcp")):
        return f"{checkpoint.name} has no shards (*.distcp)"
    return next(iter(layout.strays(checkpoint)), None)


def _loss(actor: Side, critic: Side) -> Problem | None:
    """The problem of a critic that would be given the actor's own training checkpoint."""
    if actor.meta is None or actor.problem is not None or critic.folder is None or actor.folder is None:
        return None
    if not _is_same(str(actor.folder), str(critic.folder)):
        return None
    return problems_of.critic_lost(critic.option, actor.folder, actor.meta)


def _decide(actor: Side, critic: Side | None, from_actor: bool) -> tuple[ResumeDecision, list[Problem]]:
    source = None
    if actor.checkpoint is not None and actor.problem is None:
        source = LoadFrom(actor.checkpoint, weights_only=actor.weights_only)
    if critic is not None and source is not None and from_actor and _may_stand_in(critic):
        return _start(actor, source, replace(source, weights_only=True)), []
    sides = [actor] if critic is None else [actor, critic]
    problems = [side.problem for side in sides if side.problem is not None]
    if not problems and critic is not None and not _fit(actor, critic):
        problems.append(_mismatch(actor, critic))
    if problems:
        return ResumeDecision("refuse"), problems
    if source is None:
        return ResumeDecision("cold-start"), []
    if critic is None or critic.checkpoint is None:
        return _start(actor, source, None), []
    return _start(actor, source, LoadFrom(critic.checkpoint, weights_only=critic.weights_only)), []


def _start(actor: Side, source: LoadFrom, critic: LoadFrom | None) -> ResumeDecision:
    verdict: Literal["weights-only", "resume"] = "weights-only" if source.weights_only else "resume"
    return ResumeDecision(verdict, actor.iteration, source, critic)


def _as_a_pair(actor: Side, critic: Side, *, deep: bool) -> tuple[Side, Side]:
    """Both at the newer iteration, where a run died after one tracker of a pair had moved and before the other had.

    Both halves were complete by then; that they carry one `save_id` proves that they are halves of one pair.
    """
    at = [-1 if side.iteration is None else side.iteration for side in (actor, critic)]
    ahead, behind = (actor, critic) if at[0] > at[1] else (critic, actor)
    if at[0] == at[1] or ahead.meta is None or ahead.iteration is None or behind.folder is None or behind.problem:
        return actor, critic
    checkpoint = layout.iteration_folder(behind.folder, ahead.iteration)
    moved = _with_state(replace(behind, iteration=ahead.iteration, checkpoint=checkpoint), checkpoint, deep)
    save_id = ahead.meta.extra.get("save_id")
    if moved.problem or moved.meta is None or save_id is None or moved.meta.extra.get("save_id") != save_id:
        return actor, critic
    return (ahead, moved) if ahead is actor else (moved, ahead)


def _may_stand_in(critic: Side) -> bool:
    """Whether the actor may stand in for the critic: it has no state here, or none that can be read."""
    return critic.problem.id not in MISTYPED if critic.problem is not None else critic.meta is None


def _fit(actor: Side, critic: Side) -> bool:
    """Whether both were saved at one point of one run, or both are weights, or nothing."""
    if actor.meta is None or critic.meta is None:
        return actor.meta is critic.meta and actor.is_empty == critic.is_empty
    names = [(meta.config_hash, meta.extra.get("save_id")) for meta in (actor.meta, critic.meta)]
    return actor.iteration == critic.iteration and names[0] == names[1]


def _mismatch(actor: Side, critic: Side) -> Problem:
    return problems_of.pair_mismatch(critic.option, (actor.folder, critic.folder), (_shown(actor), _shown(critic)))


def _with_way_back(problems: list[Problem], actor: Side, critic: Side | None = None, *, deep: bool) -> list[Problem]:
    """The problems with the newest iteration that can be resumed from as their fix, where there is one."""
    if actor.folder is None or any(problem.id not in GO_BACK for problem in problems):
        return problems
    at, other = actor.folder, None if critic is None else critic.folder
    newest_first = reversed(layout.list_iterations(at))
    if critic is None:
        whole = next((i for i in newest_first if align.examine(at, i, actor.role, deep=deep)[1] is None), None)
        fix = f"echo {whole} > {shlex.quote(str(at / layout.TRACKER_FILE))}"
    elif other is None or _is_same(str(other), str(at)):
        return problems
    else:
        whole = next((i for i in newest_first if align.why_no_pair(at, other, i, deep=deep) is None), None)
        fix = shlex.join(["relax", "checkpoint", "align", "--load", str(at), "--critic-load", str(other)])
        fix += " --deep --yes" if deep else " --yes"
    if whole is None:
        return problems
    newest = f"the newest complete {'one' if critic is None else 'in both'} is iteration {whole}"
    return [replace(p, expected="; ".join(filter(None, [p.expected, newest])), fix=fix) for p in problems]


def _shown(side: Side) -> str:
    if side.weights_only:
        return "weights only"
    return "no checkpoint" if side.iteration is None else f"iteration {side.iteration}"
