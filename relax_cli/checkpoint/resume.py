"""Where a run starts: one decision from the folders given, before anything is launched. docs/checkpoints.md has all
verdicts in a table."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from relax_cli.checkpoint import align, layout
from relax_cli.checkpoint.layout import CheckpointMeta
from relax_cli.checkpoint.side import Side, inspect, with_state
from relax_cli.errors import Problem, problem_kinds
from relax_cli.plugin.launch_plan import LoadFrom

declare = problem_kinds("Folders and checkpoints")
CRITIC_LOST = declare(
    "resume-critic-lost",
    "The critic is given the actor's training checkpoint, so its training would be lost. The message names the "
    "critic's folder, where the actor's checkpoint knows it. `--critic-init-from-actor` allows it: the critic takes "
    "the actor's backbone and a new value head.",
)
PAIR_MISMATCH = declare(
    "resume-pair-mismatch",
    "Actor and critic would not resume from one point: their iterations differ, one has no checkpoint, or different "
    "runs saved them. `relax checkpoint align` goes back to the newest iteration that both have.",
)
NOT_NEWEST = declare(
    "resume-not-newest",
    "A warning: the tracker names an older checkpoint than the newest complete one, which the run will replace.",
    severity="warning",
)
SAVE_IN_USE = declare("save-in-use", "The folder contains the checkpoints of another run, which would be overwritten.")
RUN_DIR_IN_USE = declare(
    "run-dir-in-use", "A run folder is new or empty, unless its run is resumed.", option="--run-dir"
)

GO_BACK = frozenset({"resume-unreadable", "checkpoint-meta-unreadable", "resume-pair-mismatch"})
"""Problems that an older iteration does not have."""
MISTYPED = frozenset({"resume-wrong-role", "resume-folder-missing", "resume-not-a-save-folder"})
"""Problems of the command, not of a critic's state."""


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
    warnings = tuple(_newer(*sides)) if decision.verdict == "resume" else ()
    return ResumeReport(decision, tuple(sides), tuple(_with_way_back(problems, *sides, deep=deep)), warnings)


def was_saved_beside_a_critic(load: str) -> bool:
    """Whether the newest checkpoint in the folder says that its run had a critic; False where nothing can be read."""
    meta = inspect("actor", "--load", load).meta
    return meta is not None and bool(meta.extra.get("has_critic", False))


def _is_same(folder: str | Path | None, other: str | Path | None) -> bool:
    return folder is not None and other is not None and os.path.realpath(folder) == os.path.realpath(other)


def _loss(actor: Side, critic: Side) -> Problem | None:
    """The problem of a critic that would be given the actor's own training checkpoint."""
    if actor.meta is None or actor.problem is not None or actor.folder is None:
        return None
    if not _is_same(actor.folder, critic.folder):
        return None
    if actor.meta.extra.get("has_critic", True):
        folder = critic_folder(actor.folder, actor.meta)
        message = "the critic would start from the actor's folder, and its training would be lost"
        given = shlex.quote(str(folder)) if folder else "CRITIC_DIR"
        fix = f"--critic-load {given}; or --critic-init-from-actor, to give its training up"
    else:
        message = "the run that saved this checkpoint had no critic, so this one would start untrained"
        fix = "--critic-init-from-actor, if that is wanted"
    return CRITIC_LOST(
        message,
        option=critic.option,
        where=str(actor.folder),
        got=f"{critic.option} for both" if critic.option == "--load" else "the actor's folder",
        expected="the folder that --critic-save named",
        fix=fix,
    )


def critic_folder(actor: Path, meta: CheckpointMeta) -> Path | None:
    """Where the critic was saved, also after both folders were moved together; None where it is gone."""
    recorded = meta.extra.get("critic_save")
    if not recorded:
        return None
    moved = actor.absolute().parent / Path(recorded).name
    places = (place for place in (Path(recorded), moved) if (place / layout.TRACKER_FILE).is_file())
    return next(places, None)


def _decide(actor: Side, critic: Side | None, from_actor: bool) -> tuple[ResumeDecision, list[Problem]]:
    sides = [actor] if critic is None else [actor, critic]
    problems = [side.problem for side in sides if side.problem is not None]
    source, critic_source = actor.source, None if critic is None else critic.source
    if critic is not None and source is not None and from_actor and _may_stand_in(critic):
        problems, critic_source = [], replace(source, weights_only=True)
    elif critic is not None and not problems and not _fit(actor, critic):
        problems = [_mismatch(actor, critic)]
    if problems:
        return ResumeDecision("refuse"), problems
    if source is None:
        return ResumeDecision("cold-start"), []
    verdict: Literal["weights-only", "resume"] = "weights-only" if source.weights_only else "resume"
    return ResumeDecision(verdict, actor.iteration, source, critic_source), []


def _may_stand_in(critic: Side) -> bool:
    """Whether the actor may stand in for the critic: it has no state here, or none that can be read."""
    return critic.problem.id not in MISTYPED if critic.problem is not None else critic.meta is None


def _as_a_pair(actor: Side, critic: Side, *, deep: bool) -> tuple[Side, Side]:
    """Both at the newer iteration, where a run died after one tracker of a pair had moved and before the other had.
    Both halves were complete by then; that they carry one `save_id` proves that they are halves of one pair."""
    at = [-1 if side.iteration is None else side.iteration for side in (actor, critic)]
    ahead, behind = (actor, critic) if at[0] > at[1] else (critic, actor)
    if at[0] == at[1] or ahead.meta is None or ahead.iteration is None or behind.folder is None or behind.problem:
        return actor, critic
    checkpoint = layout.iteration_folder(behind.folder, ahead.iteration)
    moved = with_state(replace(behind, iteration=ahead.iteration), checkpoint, deep)
    save_id = ahead.meta.extra.get("save_id")
    if moved.problem or moved.meta is None or save_id is None or moved.meta.extra.get("save_id") != save_id:
        return actor, critic
    return (ahead, moved) if ahead is actor else (moved, ahead)


def _fit(actor: Side, critic: Side) -> bool:
    """Whether both were saved at one point of one run, or both are weights, or nothing."""
    if actor.meta is None or critic.meta is None:
        return actor.meta is critic.meta and (actor.source is None) == (critic.source is None)
    return actor.iteration == critic.iteration and actor.meta.save == critic.meta.save


def _mismatch(actor: Side, critic: Side) -> Problem:
    if critic.offer == "no checkpoint":
        fix = "--critic-load CRITIC_DIR, the critic's save folder; or --critic-init-from-actor, to start it untrained"
    else:
        fix = "give the folders of one pair, --load ACTOR_DIR --critic-load CRITIC_DIR; or start again without --load"
    of_one_run = actor.offer != critic.offer
    what = "would not resume from one point" if of_one_run else "were saved by different runs"
    return PAIR_MISMATCH(
        f"actor and critic {what}",
        option=critic.option,
        where=" and ".join(str(side.folder or "(not given)") for side in (actor, critic)),
        got=f"actor {actor.offer}, critic {critic.offer}" + ("" if of_one_run else ", of different runs"),
        expected="the same iteration of both",
        fix=fix,
    )


def _newer(actor: Side, critic: Side | None = None) -> Iterator[Problem]:
    """The warning that the tracker does not name the newest checkpoint."""
    at, chosen, other = actor.folder, actor.iteration, None if critic is None else critic.folder
    if at is None or chosen is None or layout.list_iterations(at)[-1] <= chosen:
        return
    newest = next(align.resumable(at, other), chosen)
    if newest > chosen:
        yield NOT_NEWEST(
            f"the run resumes from iteration {chosen}, which the tracker names, and will replace newer checkpoints",
            option=actor.option,
            where=str(at),
            got=f"the tracker names {chosen}",
            expected=f"the newest complete one, iteration {newest}",
            fix=align.go_back(newest, at, other),
        )


def _with_way_back(problems: list[Problem], actor: Side, critic: Side | None = None, *, deep: bool) -> list[Problem]:
    """The problems with the newest iteration that can be resumed from as their fix, where there is one."""
    at, other = actor.folder, None if critic is None else critic.folder
    if at is None or any(problem.id not in GO_BACK for problem in problems):
        return problems
    if critic is not None and (other is None or _is_same(other, at)):
        return problems
    whole = next(align.resumable(at, other, deep=deep), None)
    if whole is None:
        return problems
    fix = align.go_back(whole, at, other, deep=deep)
    newest = f"the newest complete {'one' if critic is None else 'in both'} is iteration {whole}"
    return [replace(p, expected="; ".join(filter(None, [p.expected, newest])), fix=fix) for p in problems]
