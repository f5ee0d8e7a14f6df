"""Rules about what a run writes to: folders and trackers."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from relax_cli.checkpoint.resume import RUN_DIR_IN_USE, SAVE_IN_USE
from relax_cli.config.names import nearest
from relax_cli.config.schema import CheckpointSection, Config, CriticSection, RunSection
from relax_cli.errors import MACHINE_THEME
from relax_cli.plugin.trackers import Tracker, tracker_names
from relax_cli.preflight.completion import beside, counts_from_zero, has_checkpoints, holds_a_run
from relax_cli.preflight.rules.registry import Finding, Found, rule

THEME = "Folders and checkpoints"


@rule("save-interval-without-save", THEME, option="--save-interval")
def save_interval_without_save(checkpoint: CheckpointSection) -> Found:
    """`--save-interval` needs `--save`."""
    if checkpoint.save_interval is not None and checkpoint.save is None:
        yield Finding(fix="add --save DIR, or drop --save-interval")


@rule("critic-save-without-save", THEME, option="--critic-save")
def critic_save_without_save(config: Config) -> Found:
    """The critic is saved, but not the actor, so the run could never be resumed."""
    critic = config.critic.critic_save
    if "critic" in config.parallel.resource and config.checkpoint.save is None and critic is not None:
        yield Finding(fix=f"add --save {shlex.quote(critic.rstrip('/') + '-actor')}, or drop --critic-save")


@rule(RUN_DIR_IN_USE, needs="files")
def run_dir_in_use(run: RunSection, checkpoint: CheckpointSection) -> Found:
    """A run folder is new or empty, unless its run is resumed."""
    path = None if run.run_dir is None else Path(run.run_dir)
    if path is not None and checkpoint.load is None and holds_a_run(path):
        save = checkpoint.save
        resume = f", or resume with --load {shlex.quote(save)}" if save is not None and has_checkpoints(save) else ""
        fix = f"--run-dir {shlex.quote(unused_name(str(run.run_dir)))}{resume}"
        yield Finding("the run folder has a run or other files in it", fix, expected="a new or empty folder")


@rule("old-step-numbers", THEME, option="--run-dir", needs="files")
def old_step_numbers(run: RunSection, checkpoint: CheckpointSection) -> Found:
    """The run folder numbers its steps from 0, as an earlier version did. Steps begin at 1 now, and one folder does not
    mix both: the run is resumed into another folder."""
    if run.run_dir is not None and checkpoint.load is not None and counts_from_zero(Path(run.run_dir)):
        fix = f"--run-dir {shlex.quote(unused_name(run.run_dir))}"
        yield Finding(fix=fix, expected="a new folder, or one whose steps begin at 1")


@rule(SAVE_IN_USE, needs="files")
def save_in_use(checkpoint: CheckpointSection, critic: CriticSection) -> Found:
    """The folder contains the checkpoints of another run, which would be overwritten."""
    pairs = (
        ("save", "load", checkpoint.save, checkpoint.load),
        ("critic-save", "critic-load", critic.critic_save, critic.critic_load or checkpoint.load),
    )
    for option, load, folder, source in pairs:
        if folder is not None and has_checkpoints(folder) and not same_folder(folder, source):
            fix = f"choose another folder, or resume that run with --{load} {shlex.quote(folder)}"
            yield Finding(fix=fix, option=f"--{option}", expected="a folder without checkpoints")


@rule("one-folder-for-two", THEME, option="--critic-save", needs="files")
def one_folder_for_two(checkpoint: CheckpointSection, critic: CriticSection) -> Found:
    """Actor and critic need two folders."""
    save = checkpoint.save
    if save is not None and same_folder(save, critic.critic_save):
        message = "actor and critic would be saved to one folder and overwrite each other"
        yield Finding(message, f"--critic-save {shlex.quote(beside(save))}", expected="two folders")


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
        existing = nearest_existing(Path(folder or "/"))
        if folder is not None and (what := _write_fault(existing)):
            chmod = f", or chmod u+wx {existing}" if "user" in what else ""
            message, fix = (
                f"nothing can be written to the folder of {option}",
                f"{option} DIR with a folder of your own",
            )
            expected = "a folder that can be written to"
            yield Finding(message, f"{fix}{chmod}", f"{existing} is {what}", expected, option)


def _write_fault(place: Path) -> str:
    """What a place is where nothing can be written; empty where something can."""
    if not place.is_dir():
        return "a link to nowhere" if place.is_symlink() else "a file"
    # No file can be made there, though root seems to be allowed to.
    if place.stat().st_dev in {os.stat(kernel).st_dev for kernel in ("/proc", "/sys") if os.path.ismount(kernel)}:
        return "a folder of the kernel, which keeps no files"
    allowed = os.access(place, os.W_OK | os.X_OK, effective_ids=True)
    return "" if allowed else "a folder that this user cannot write to"


@rule("tracker-unknown", "Trackers", option="--track")
def tracker_unknown(run: RunSection, trackers: Mapping[str, Tracker]) -> Found:
    """No built-in tracker and no plugin has the name that `--track` gives."""
    for name in run.track:
        if name not in trackers:
            several = name.replace(",", " ").split()
            guesses = several if set(several) <= trackers.keys() else filter(None, [nearest(name, trackers)])
            fix = " ".join(f"--track {guess}" for guess in guesses)
            fix = fix or f"install its plugin, or drop --track {shlex.quote(name)}"
            yield Finding(f"there is no tracker {name!r}", fix, name, ", ".join(trackers))


@rule("tracker-missing", MACHINE_THEME, option="--track", needs="machine")
def tracker_missing(run: RunSection, trackers: Mapping[str, Tracker]) -> Found:
    """A tracker of `--track` needs a package that is not installed."""
    for name in tracker_names(run):
        package = trackers[name].package if name in trackers else ""
        if package and importlib.util.find_spec(package) is None:
            fix = trackers[name].install or f"pip install {package}"
            yield Finding(f"the tracker {name} needs the package {package}, which is not installed", fix)


def unused_name(folder: str) -> str:
    """A folder next to this one that does not exist."""
    base = folder.rstrip("/")
    return next(name for count in itertools.count(2) if not os.path.lexists(name := f"{base}-{count}"))


def nearest_existing(path: Path) -> Path:
    """`path`, or what exists above it."""
    for place in (path.absolute(), *path.absolute().parents):
        # A link to nowhere also blocks a folder.
        if os.path.lexists(place):
            return place
    return Path("/")


def same_folder(one: str, other: str | None) -> bool:
    """Whether two paths lead to one folder, which need not exist."""
    return other is not None and os.path.realpath(one) == os.path.realpath(other)
