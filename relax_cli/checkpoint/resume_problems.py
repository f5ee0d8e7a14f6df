"""What to say when a run cannot start from the checkpoints it was given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from relax_cli.checkpoint import layout
from relax_cli.checkpoint.layout import CheckpointMeta
from relax_cli.errors import Problem


def unusable(option: str, where: Path, reason: str) -> Problem:
    """Tracker or checkpoint cannot be used."""
    return Problem(
        id="resume-unreadable",
        message=f"cannot resume: {reason}",
        option=option,
        where=str(where),
        got=reason,
        expected="a folder with a readable tracker and the complete checkpoint it names",
        fix="give a complete copy of the folder, or start anew without --load",
    )


def not_a_save_folder(option: str, folder: Path) -> Problem:
    """One checkpoint was given instead of the folder that holds them."""
    return Problem(
        id="resume-not-a-save-folder",
        message=f"{option} leads to one checkpoint, not to the save folder with the tracker",
        option=option,
        where=str(folder),
        got=f"no {layout.TRACKER_FILE}, but the files of a checkpoint",
        expected=f"a folder with {layout.TRACKER_FILE}",
        fix=f"{option} {folder.absolute().parent}",
    )


def wrong_role(role: str, option: str, checkpoint: Path, found: str) -> Problem:
    """The folder of the other role."""
    return Problem(
        id="resume-wrong-role",
        message=f"{option} leads to a checkpoint of the {found}, where the {role}'s is needed",
        option=option,
        where=str(checkpoint),
        got=f"role {found}",
        expected=f"role {role}",
        fix="--load takes the actor's save folder, --critic-load the critic's",
    )


def critic_lost(option: str, actor: Path, meta: CheckpointMeta) -> Problem:
    """The critic is given the actor's training checkpoint."""
    folder = _critic_folder(actor, meta)
    if meta.extra.get("has_critic", True):
        message = "the critic would start anew from the actor's folder: its training would be lost"
        fix = f"--critic-load {folder or 'CRITIC_DIR'}; or --critic-init-from-actor, to give its training up"
    else:
        message = "the run that saved this checkpoint had no critic, so this one would start anew"
        fix = "--critic-init-from-actor, if that is wanted"
    return Problem(
        id="resume-critic-lost",
        message=message,
        option=option,
        where=str(actor),
        got=f"{option} for the critic, too" if option == "--load" else "the actor's folder",
        expected="the folder that --critic-save named",
        fix=fix,
    )


def _critic_folder(actor: Path, meta: CheckpointMeta) -> Path | None:
    """Where the critic was saved, also after both folders were moved together; None where it is not there any more."""
    recorded = meta.extra.get("critic_save")
    if not isinstance(recorded, str) or not recorded:
        return None
    moved = actor.absolute().parent / Path(recorded).name
    places = (place for place in (Path(recorded), moved) if (place / layout.TRACKER_FILE).is_file())
    return next(places, None)


def pair_mismatch(option: str, folders: Sequence[Path | None], shown: Sequence[str]) -> Problem:
    """Actor and critic are not at one point of one run.

    Args:
        folders: of actor and critic.
        shown: what each offers.
    """
    if shown[1] == "no checkpoint":
        fix = "give the critic's save folder: --critic-load CRITIC_DIR; or --critic-init-from-actor, to begin it anew"
    else:
        fix = "start anew without --load, or give the folders of one pair: --load ACTOR_DIR --critic-load CRITIC_DIR"
    of_one_run = shown[0] != shown[1]
    return Problem(
        id="resume-pair-mismatch",
        message="actor and critic would not resume from one point"
        if of_one_run
        else "actor and critic were saved by different runs",
        option=option,
        where=" and ".join(str(folder or "(not given)") for folder in folders),
        got=f"actor {shown[0]}, critic {shown[1]}" + ("" if of_one_run else ", of different runs"),
        expected="the same iteration of both",
        fix=fix,
    )


def nothing_left(where: Path | None, iteration: int, last: int) -> Problem:
    """The checkpoint is at or beyond the end of the run."""
    return Problem(
        id="resume-nothing-left",
        message=f"nothing is left to do: the checkpoint has finished {iteration} rollouts",
        option="--num-rollout",
        where=str(where),
        got=str(last),
        expected=f"more than {iteration}",
        fix=f"--num-rollout {2 * iteration}",
    )


def would_overwrite(option: str, folder: str) -> Problem:
    """A run that starts at 0 would replace the checkpoints of another one."""
    return Problem(
        id="save-in-use",
        message=f"the run starts at rollout 0, and the folder of {option} holds other checkpoints",
        fix=f"{option} {folder.rstrip('/')}-new",
        option=option,
        got=folder,
        expected="a folder without checkpoints",
    )


def other_reference(hf_checkpoint: str) -> Problem:
    """KL terms would not compare with the weights that the run starts from."""
    return Problem(
        id="reference-not-start",
        message="KL terms compare with the model of --hf-checkpoint, not with the weights that the run starts from",
        option="--ref-load",
        got=f"unset, so {hf_checkpoint}",
        expected="the model to compare with, named",
        fix=f"--ref-load {hf_checkpoint}, if this is meant; or the folder of the model that was converted",
        severity="warning",
    )


def run_dir_in_use(run_dir: str) -> Problem:
    """A run that starts at 0 would drop the metrics of another one."""
    return Problem(
        id="run-dir-in-use",
        message="the run starts at rollout 0, and the run folder already holds a run",
        fix=f"--run-dir {run_dir.rstrip('/')}-2",
        option="--run-dir",
        got=run_dir,
        expected="a new or empty folder",
    )
