"""Rules about the folders that a run writes to."""

from __future__ import annotations

import os
from pathlib import Path

from relax_cli.checkpoint.layout import TRACKER_FILE
from relax_cli.config.schema import CheckpointSection, Config, CriticSection, RunSection
from relax_cli.errors import MACHINE_THEME
from relax_cli.preflight.rules.registry import Finding, Found, rule

THEME = "Folders and checkpoints"


@rule("save-interval-without-save", THEME, option="--save-interval")
def save_interval_without_save(checkpoint: CheckpointSection) -> Found:
    """`--save-interval` needs `--save`."""
    if checkpoint.save_interval is not None and checkpoint.save is None:
        yield Finding(
            "--save-interval is set, but there is no folder to save to",
            got=str(checkpoint.save_interval),
            fix="add --save DIR (and --critic-save DIR for a run with a critic), or drop --save-interval",
        )


@rule("critic-save-missing", THEME, option="--critic-save", severity="warning")
def critic_save_missing(config: Config) -> Found:
    """A warning: without `--critic-save` the run can never be resumed."""
    save = config.checkpoint.save
    if "critic" in config.parallel.resource and save is not None and config.critic.critic_save is None:
        fix = f"add --critic-save {save.rstrip('/')}-critic"
        yield Finding("the critic is not saved, so this run can never be resumed", fix)


@rule("critic-save-without-save", THEME, option="--critic-save")
def critic_save_without_save(config: Config) -> Found:
    """The critic is saved, but not the actor, so the run could never be resumed."""
    critic = config.critic.critic_save
    if "critic" in config.parallel.resource and config.checkpoint.save is None and critic is not None:
        fix = f"add --save {critic.rstrip('/')}-actor, or drop --critic-save"
        yield Finding("the critic is saved, but the actor is not, so this run can never be resumed", fix, critic)


@rule("run-dir-in-use", THEME, option="--run-dir", needs="files")
def run_dir_in_use(run: RunSection, checkpoint: CheckpointSection) -> Found:
    """A run folder is new or empty, unless its run is resumed."""
    path = None if run.run_dir is None else Path(run.run_dir)
    if path is None or (path.is_dir() and (checkpoint.load is not None or not any(path.iterdir()))):
        return
    if path.exists():
        yield Finding(
            "the run folder already holds a run",
            got=str(run.run_dir),
            expected="a new or empty folder",
            fix=f"--run-dir {str(run.run_dir).rstrip('/')}-2, or resume with --load {checkpoint.save or 'DIR'}",
        )


@rule("save-in-use", THEME, needs="files")
def save_in_use(checkpoint: CheckpointSection, critic: CriticSection) -> Found:
    """The folder holds the checkpoints of another run, which would be overwritten."""
    pairs = (
        ("save", "load", checkpoint.save, checkpoint.load),
        ("critic-save", "critic-load", critic.critic_save, critic.critic_load or checkpoint.load),
    )
    for option, load, folder, source in pairs:
        if folder is not None and _has_checkpoints(Path(folder)) and not _same_folder(folder, source):
            yield Finding(
                f"the folder of --{option} holds the checkpoints of another run",
                option=f"--{option}",
                got=folder,
                expected="a folder without checkpoints",
                fix=f"choose another folder, or resume that run with --{load} {folder}",
            )


@rule("one-folder-for-two", THEME, option="--critic-save", needs="files")
def one_folder_for_two(checkpoint: CheckpointSection, critic: CriticSection) -> Found:
    """Actor and critic need two folders."""
    save = checkpoint.save
    if save is not None and _same_folder(save, critic.critic_save):
        yield Finding(
            "actor and critic would be saved to one folder and overwrite each other",
            got=save,
            expected="two folders",
            fix=f"--critic-save {save.rstrip('/')}-critic",
        )


@rule("folder-read-only", MACHINE_THEME, needs="machine")
def folder_read_only(config: Config) -> Found:
    """`--save`, `--critic-save` or `--run-dir` names a place where this user cannot write. A folder that is only
    resumed from may be read-only."""
    places = {
        "--save": config.checkpoint.save,
        "--critic-save": config.critic.critic_save,
        "--run-dir": config.run.run_dir,
    }
    for option, folder in places.items():
        if folder is None:
            continue
        existing = nearest_existing(Path(folder))
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK, effective_ids=True):
            yield Finding(
                f"nothing can be written to the folder of {option}",
                option=option,
                got=f"{existing} is {'read-only here' if existing.is_dir() else 'not a folder'}",
                expected="a folder that can be written to",
                fix=f"{option} DIR with a folder of your own, or chmod u+wx {existing}",
            )


def nearest_existing(path: Path) -> Path:
    """`path`, or what exists above it."""
    for place in (path.absolute(), *path.absolute().parents):
        # A link to nowhere also blocks a folder.
        if os.path.lexists(place):
            return place
    return Path("/")


def _has_checkpoints(folder: Path) -> bool:
    tracker = folder / TRACKER_FILE
    return tracker.is_file() and tracker.stat().st_size > 0


def _same_folder(one: str, other: str | None) -> bool:
    return other is not None and os.path.realpath(one) == os.path.realpath(other)
