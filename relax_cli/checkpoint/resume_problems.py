"""Why a run cannot start from the folders it was given, and what to type instead."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from relax_cli.checkpoint import layout
from relax_cli.checkpoint.layout import CheckpointMeta
from relax_cli.errors import Problem, problem_kinds

FOLDERS = "Folders and checkpoints"
declare = problem_kinds(FOLDERS)
UNREADABLE = declare("resume-unreadable", "The tracker, or the checkpoint it names, is missing, damaged or incomplete.")
FOLDER_MISSING = declare(
    "resume-folder-missing",
    "`--load` or `--critic-load` names a folder that does not exist. Only the folder of the same side's `--save` may "
    "be new: with `--load X --save X` a script starts from nothing the first time, and resumes after that.",
)
NOT_A_SAVE_FOLDER = declare(
    "resume-not-a-save-folder",
    "`--load` or `--critic-load` names something other than a save folder: one checkpoint (`iter_0000040`) instead of "
    "the folder around it, the folder above, a model, training data, a run folder, or a folder without a checkpoint.",
)
WRONG_ROLE = declare("resume-wrong-role", "The folder contains the checkpoint of the other role.")
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
NOTHING_LEFT = declare(
    "resume-nothing-left", "The checkpoint has more rollouts than `--num-rollout`.", option="--num-rollout"
)
SAVE_IN_USE = declare("save-in-use", "The folder contains the checkpoints of another run, which would be overwritten.")
REFERENCE_NOT_START = declare(
    "reference-not-start",
    "A warning: a run that starts from bare weights compares its KL terms with `--hf-checkpoint`, as no `--ref-load` "
    "is given.",
    option="--ref-load",
    severity="warning",
)
RUN_DIR_IN_USE = declare(
    "run-dir-in-use", "A run folder is new or empty, unless its run is resumed.", option="--run-dir"
)

NO_CHECKPOINT = "a folder without a checkpoint"
MODEL_FILES = ("*.safetensors", "*.bin", "*.gguf", "tokenizer.json", "tokenizer_config.json")
DATA_FILES = ("*.jsonl", "*.parquet", "*.json", "*.jsonl.*")


def unusable(option: str, where: Path, reason: str) -> Problem:
    """Tracker or checkpoint cannot be used."""
    return UNREADABLE(
        f"cannot resume: {reason}",
        option=option,
        where=str(where),
        got=reason,
        expected="a readable tracker and the complete checkpoint it names",
        fix="give a complete copy of the folder, or start again without --load",
    )


def folder_missing(option: str, folder: Path) -> Problem:
    """A folder that is not there, and that the run would not make either."""
    near = [path for path in _siblings(folder) if (path / layout.TRACKER_FILE).is_file()]
    here = f"save folders next to it: {', '.join(map(str, near[:4]))}" if near else "an existing save folder"
    save = option.replace("load", "save")
    return FOLDER_MISSING(
        f"{option} leads to no folder",
        option=option,
        where=str(folder),
        got="no such folder",
        expected=here,
        fix=f"{save} {shlex.quote(str(folder))} if the run makes this folder; or start again without {option}",
    )


def not_a_save_folder(option: str, folder: Path, role: str) -> Problem:
    """The folder is there, but no save folder."""
    found, fix = _recognised(option, folder, role)
    return NOT_A_SAVE_FOLDER(
        f"{option} leads to {found}, not to a save folder",
        option=option,
        where=str(folder),
        got=found,
        expected=f"the folder that --save named, with {layout.TRACKER_FILE}",
        fix=fix,
    )


def is_one_checkpoint(folder: Path) -> bool:
    """Whether the folder is a checkpoint itself."""
    return any((folder / name).exists() for name in (layout.META_FILE, ".metadata"))


def _recognised(option: str, folder: Path, role: str) -> tuple[str, str]:
    """What a folder is, and what to do instead."""
    without = f"start again without {option}"
    if not folder.is_dir():
        return "a file", without
    if is_one_checkpoint(folder):
        return "one checkpoint", f"{option} {shlex.quote(str(folder.absolute().parent))}"
    inner = [path for path in sorted(folder.iterdir()) if (path / layout.TRACKER_FILE).is_file()]
    if inner:
        own = [path for path in inner if len(inner) == 1 or path.name == role]
        choice = " or ".join(f"{option} {shlex.quote(str(path))}" for path in own or inner[:4])
        return "the folder above save folders", choice
    if (folder / "metrics.jsonl").is_file():
        saved = _save_folder_of(folder, role)
        return "a run folder", f"{option} {shlex.quote(saved)}" if saved else f"{option} with the folder of --save"
    if (folder / "config.json").is_file() and _has(folder, MODEL_FILES):
        return "a model", f"--hf-checkpoint {shlex.quote(str(folder))}, without {option}"
    if layout.list_iterations(folder):
        return f"checkpoints without {layout.TRACKER_FILE}", without
    if _has(folder, DATA_FILES):
        return "data", f"{without}; --prompt-data takes a file"
    return NO_CHECKPOINT, without


def _has(folder: Path, patterns: Sequence[str]) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _save_folder_of(run_dir: Path, role: str) -> str | None:
    """Where the run of a run folder saved a role, if that is still there."""
    section, name = ("critic", "critic_save") if role == "critic" else ("checkpoint", "save")
    try:
        config = json.loads(layout.read_small_file(run_dir / "config.json", layout.MOST_META_BYTES))
        saved = str(config[section][name] or "")
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return saved if saved and (Path(saved) / layout.TRACKER_FILE).is_file() else None


def _siblings(folder: Path) -> list[Path]:
    parent = folder.absolute().parent
    return sorted(parent.iterdir()) if parent.is_dir() else []


def wrong_role(role: str, option: str, checkpoint: Path, found: str) -> Problem:
    """The folder of the other role."""
    return WRONG_ROLE(
        f"{option} leads to a checkpoint of the {found}, where the {role}'s is needed",
        option=option,
        where=str(checkpoint),
        got=f"role {found}",
        expected=f"role {role}",
        fix="--load takes the actor's save folder, --critic-load the critic's",
    )


def critic_lost(option: str, actor: Path, meta: CheckpointMeta) -> Problem:
    """The critic is given the actor's training checkpoint."""
    folder = critic_folder(actor, meta)
    if meta.extra.get("has_critic", True):
        message = "the critic would start from the actor's folder, and its training would be lost"
        given = shlex.quote(str(folder)) if folder else "CRITIC_DIR"
        fix = f"--critic-load {given}; or --critic-init-from-actor, to give its training up"
    else:
        message = "the run that saved this checkpoint had no critic, so this one would start untrained"
        fix = "--critic-init-from-actor, if that is wanted"
    return CRITIC_LOST(
        message,
        option=option,
        where=str(actor),
        got=f"{option} for both" if option == "--load" else "the actor's folder",
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


def pair_mismatch(option: str, folders: Sequence[Path | None], shown: Sequence[str]) -> Problem:
    """Actor and critic are not at one point of one run.

    Args:
        folders: of actor and critic.
        shown: what each offers.
    """
    if shown[1] == "no checkpoint":
        fix = "--critic-load CRITIC_DIR, the critic's save folder; or --critic-init-from-actor, to start it untrained"
    else:
        fix = "give the folders of one pair, --load ACTOR_DIR --critic-load CRITIC_DIR; or start again without --load"
    of_one_run = shown[0] != shown[1]
    return PAIR_MISMATCH(
        "actor and critic would not resume from one point"
        if of_one_run
        else "actor and critic were saved by different runs",
        option=option,
        where=" and ".join(str(folder or "(not given)") for folder in folders),
        got=f"actor {shown[0]}, critic {shown[1]}" + ("" if of_one_run else ", of different runs"),
        expected="the same iteration of both",
        fix=fix,
    )


def nothing_left(where: Path | None, iteration: int, last: int) -> Problem:
    """The checkpoint is beyond the end of the run."""
    return NOTHING_LEFT(
        f"nothing is left to do: the checkpoint has finished {iteration} rollouts",
        where=str(where),
        got=str(last),
        expected=f"at least {iteration}",
        fix=f"--num-rollout with a number above {iteration}; the learning-rate schedule stretches to it",
    )


def would_overwrite(option: str, folder: str) -> Problem:
    """A run that starts at 0 would replace the checkpoints of another one."""
    return SAVE_IN_USE(
        f"the run starts at step 1, and the folder of {option} contains other checkpoints",
        fix=f"{option} {shlex.quote(folder.rstrip('/') + '-new')}",
        option=option,
        got=folder,
        expected="a folder without checkpoints",
    )


def other_reference(hf_checkpoint: str) -> Problem:
    """KL terms would not compare with the weights that the run starts from."""
    return REFERENCE_NOT_START(
        "KL terms compare with the model of --hf-checkpoint, not with the weights that the run starts from",
        got=f"unset, so {hf_checkpoint}",
        expected="the model to compare with, named",
        fix=f"--ref-load {shlex.quote(hf_checkpoint)}, if this is meant; or the folder of the model that was converted",
    )


def run_dir_in_use(run_dir: str) -> Problem:
    """A run that starts at 0 would drop the metrics of another one."""
    return RUN_DIR_IN_USE(
        "the run starts at step 1, and the run folder already contains a run",
        fix=f"--run-dir {shlex.quote(run_dir.rstrip('/') + '-2')}",
        got=run_dir,
        expected="a new or empty folder",
    )
