"""What the folder of one role offers to a run, or why it offers nothing and what to type instead."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from relax_cli.checkpoint import layout
from relax_cli.errors import Problem, ResumeError, problem_kinds
from relax_cli.plugin.launch_plan import LoadFrom

declare = problem_kinds("Folders and checkpoints")
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

RELEASE = "release"
"""Tracker text, and folder, of weights that no run counted."""
NO_CHECKPOINT = "a folder without a checkpoint"
MODEL_FILES = ("*.safetensors", "*.bin", "*.gguf", "tokenizer.json", "tokenizer_config.json")
DATA_FILES = ("*.jsonl", "*.parquet", "*.json", "*.jsonl.*")


@dataclass(frozen=True)
class Side:
    """What one role's folder offers."""

    role: str
    option: str
    """That named the folder: `--critic-load` follows `--load`."""
    folder: Path | None
    iteration: int | None = None
    """None where there is no checkpoint, or only weights."""
    problem: Problem | None = None
    checkpoint: Path | None = None
    """Folder of the one checkpoint that the tracker names, where it is there."""
    meta: layout.CheckpointMeta | None = None
    """Its `relax.json`; None for weights, or where it cannot be used."""

    @property
    def weights_only(self) -> bool:
        """Whether there are weights without the state of a run."""
        return self.source is not None and self.source.weights_only

    @property
    def source(self) -> LoadFrom | None:
        """What the role would load; None where there is nothing, or something is wrong."""
        if self.checkpoint is None or self.problem is not None:
            return None
        return LoadFrom(self.checkpoint, weights_only=self.meta is None)

    @property
    def offer(self) -> str:
        """What it offers, in two words."""
        if self.weights_only:
            return "weights only"
        return "no checkpoint" if self.iteration is None else f"iteration {self.iteration}"


def inspect(role: str, option: str, folder: str | None, *, deep: bool = False, may_be_new: bool = True) -> Side:
    """Read tracker and `relax.json` of one role, whose folder `may_be_new`: missing, or empty."""
    if folder is None:
        return Side(role, option, None)
    side = Side(role, option, path := Path(folder))
    try:
        return _inspect(side, path, deep, may_be_new)
    except OSError as error:
        return _unusable(side, f"{error.strerror}: {error.filename}")


def _inspect(side: Side, path: Path, deep: bool, may_be_new: bool) -> Side:
    if path.exists() and not path.is_dir():
        return replace(side, problem=not_a_save_folder(side.option, path, side.role))
    tracker = layout.read_tracker(path)
    if tracker.problem is not None:
        return _unusable(side, tracker.problem)
    if tracker.iteration is None:
        # A kill in the first save leaves one without a tracker.
        if may_be_new and len(found := layout.list_iterations(path)) > 1:
            return _unusable(side, f"{layout.TRACKER_FILE} is missing, and there are {len(found)} checkpoints")
        if may_be_new and not is_one_checkpoint(path):
            return side
        problem = not_a_save_folder(side.option, path, side.role) if path.exists() else _missing(side.option, path)
        return replace(side, problem=problem)
    iteration = tracker.iteration if isinstance(tracker.iteration, int) else None
    checkpoint = path / RELEASE if iteration is None else layout.iteration_folder(path, iteration)
    side = replace(side, iteration=iteration)
    if not checkpoint.is_dir():
        named = f"iteration {iteration}" if iteration is not None else f"`{RELEASE}`"
        return _unusable(side, f"the tracker names {named}, but {checkpoint.name} is missing")
    metas = (layout.iteration_folder(path, i) / layout.META_FILE for i in layout.list_iterations(path))
    # Where relax has written to the folder, a missing `relax.json` is damage.
    if not (checkpoint / layout.META_FILE).exists() and not any(meta.exists() for meta in metas):
        side, reason = replace(side, iteration=None, checkpoint=checkpoint), layout_of_weights(checkpoint)
        return side if reason is None else _unusable(side, reason)
    return with_state(side, checkpoint, deep)


def with_state(side: Side, checkpoint: Path, deep: bool) -> Side:
    """The side with `relax.json` of `checkpoint`, or with the reason why it cannot be loaded as this role's."""
    side = replace(side, checkpoint=checkpoint)
    try:
        meta = layout.read_meta(checkpoint)
        is_small = sum(entry.size for entry in meta.files) <= layout.MOST_HASHED_BYTES
        found = layout.damages(checkpoint, deep=deep or is_small)
    except ResumeError as error:
        return replace(side, problem=error.problems[0])
    side = replace(side, meta=meta)
    if meta.role != side.role:
        wrong = WRONG_ROLE(
            f"{side.option} leads to a checkpoint of the {meta.role}, where the {side.role}'s is needed",
            option=side.option,
            where=str(checkpoint),
            got=f"role {meta.role}",
            expected=f"role {side.role}",
            fix="--load takes the actor's save folder, --critic-load the critic's",
        )
        return replace(side, problem=wrong)
    if meta.iteration != side.iteration:
        return _unusable(side, f"{layout.META_FILE} says iteration {meta.iteration}")
    return _unusable(side, found[0]) if found else side


def layout_of_weights(checkpoint: Path) -> str | None:
    """Why a folder without `relax.json` is not a sharded checkpoint of Megatron's; None when it is one."""
    for name in (".metadata", "metadata.json"):
        if not (checkpoint / name).is_file():
            return f"{checkpoint.name} has neither {layout.META_FILE} nor {name} of a sharded Megatron checkpoint"
    if not any(checkpoint.glob("*.distcp")):
        return f"{checkpoint.name} has no shards (*.distcp)"
    return next(iter(layout.strays(checkpoint)), None)


def is_one_checkpoint(folder: Path) -> bool:
    """Whether the folder is a checkpoint itself."""
    return any((folder / name).exists() for name in (layout.META_FILE, ".metadata"))


def _unusable(side: Side, reason: str) -> Side:
    problem = UNREADABLE(
        f"cannot resume: {reason}",
        option=side.option,
        where=str(side.checkpoint or side.folder),
        got=reason,
        expected="a readable tracker and the complete checkpoint it names",
        fix="give a complete copy of the folder, or start again without --load",
    )
    return replace(side, problem=problem)


def _missing(option: str, folder: Path) -> Problem:
    """The problem of a folder that is not there, and that the run would not make either."""
    parent = folder.absolute().parent
    near = [str(path.parent) for path in sorted(parent.glob(f"*/{layout.TRACKER_FILE}")) if path.is_file()]
    return FOLDER_MISSING(
        f"{option} leads to no folder",
        option=option,
        where=str(folder),
        got="no such folder",
        expected=f"save folders next to it: {', '.join(near[:4])}" if near else "an existing save folder",
        fix=f"{option.replace('load', 'save')} {shlex.quote(str(folder))} if the run makes this folder; "
        f"or start again without {option}",
    )


def not_a_save_folder(option: str, folder: Path, role: str) -> Problem:
    """The problem of a folder that is there, but is no save folder."""
    found, fix = _recognised(option, folder, role)
    return NOT_A_SAVE_FOLDER(
        f"{option} leads to {found}, not to a save folder",
        option=option,
        where=str(folder),
        got=found,
        expected=f"the folder that --save named, with {layout.TRACKER_FILE}",
        fix=fix,
    )


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
    if (folder / "config.json").is_file() and any(path for pattern in MODEL_FILES for path in folder.glob(pattern)):
        if option == "--critic-load":
            # As --hf-checkpoint it would be the actor's model as well.
            return "a model", f"{without}: a new critic is the model of --hf-checkpoint with a value head"
        return "a model", f"--hf-checkpoint {shlex.quote(str(folder))}, without {option}"
    if layout.list_iterations(folder):
        whole = layout.complete_iterations(folder)
        fix = f"echo {whole[-1]} > {shlex.quote(str(folder / layout.TRACKER_FILE))}" if whole else without
        return f"checkpoints without {layout.TRACKER_FILE}", fix
    if any(path for pattern in DATA_FILES for path in folder.glob(pattern)):
        return "data", f"{without}; --prompt-data takes a file"
    return NO_CHECKPOINT, without


def _save_folder_of(run_dir: Path, role: str) -> str | None:
    """Where the run of a run folder saved a role, if that is still there."""
    section, name = ("critic", "critic_save") if role == "critic" else ("checkpoint", "save")
    try:
        record = json.loads(layout.read_small_file(run_dir / "config.json", layout.MOST_META_BYTES))
        config = record.get("config", record)  # Older versions wrote nothing around it.
        saved = str(config[section][name] or "")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return saved if saved and (Path(saved) / layout.TRACKER_FILE).is_file() else None
