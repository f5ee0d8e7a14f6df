"""Ctrl-C and SIGTERM: the step under way is finished and saved, and the screen says at once what happens."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

import pytest

from relax_cli.checkpoint import layout
from relax_cli.engine.run_folder import claimed
from tests.support.fault_runs import Folders, Zygote, arguments

CODES = {"SIGINT": 130, "SIGTERM": 143}
THIRD_STEP = ("run/rollouts/.step_000003", 1)
"""The samples of the third step are written: it is nearly done, and not saved yet."""


def saved(folders: Folders) -> int | str | None:
    """Where both trackers stand."""
    (iteration,) = {layout.read_tracker(folder).iteration for folder in (folders.actor, folders.critic)}
    return iteration


@pytest.mark.parametrize(
    ("name", "options"), [*((name, ["--save-interval", "5"]) for name in CODES), ("SIGTERM", ["--async-save"])]
)
def test_a_signal_saves_the_step_and_the_printed_command_resumes(
    zygote: Zygote, task: Path, straight: Folders, tmp_path: Path, name: str, options: list[str]
) -> None:
    folders = Folders(tmp_path)
    ended = zygote.run(tmp_path, arguments(task, folders, *options), fault=(name, *THIRD_STEP))
    assert ended.code == CODES[name], ended.err
    assert "finishing step 3, then saving" in ended.err
    assert "Traceback" not in ended.err
    assert saved(folders) == 3
    assert folders.metrics() == straight.metrics()[:3]
    (command,) = [shlex.split(line) for line in ended.out.splitlines() if line.startswith("  relax train")]
    assert zygote.run(tmp_path, command[1:]).code == 0
    assert folders.metrics() == straight.metrics()
    assert folders.samples() == straight.samples()


SECOND_SAVE = {"shards": ("actor/.iter_0000002.tmp/__0_0.distcp", 1), "tracker": ("critic/.latest_checkpointed", 3)}


@pytest.mark.parametrize(
    ("part", "options", "finished"), [("shards", [], 2), ("tracker", [], 2), ("shards", ["--async-save"], 3)]
)
def test_ctrl_c_during_a_save_lets_the_save_finish(
    zygote: Zygote, task: Path, tmp_path: Path, part: str, options: list[str], finished: int
) -> None:
    folders = Folders(tmp_path)
    ended = zygote.run(tmp_path, arguments(task, folders, *options), fault=("SIGINT", *SECOND_SAVE[part]))
    assert ended.code == 130, ended.err
    assert saved(folders) == len(folders.metrics())
    # The third step may have begun while the thread opened the file.
    assert 2 <= len(folders.metrics()) <= finished
    assert not layout.list_leftovers(folders.actor)
    assert ended.err.count("; Ctrl-C again stops now") == 1


def test_a_signal_while_the_run_is_starting_stops_it_at_once(zygote: Zygote, task: Path, tmp_path: Path) -> None:
    for name, code in CODES.items():
        folders = Folders(tmp_path / name)
        ended = zygote.run(folders.root, arguments(task, folders), fault=(name, "run/rollouts", 1))
        assert ended.code == code, ended.err
        assert "Traceback" not in ended.err
        assert "before the first step finished; all processes have exited" in ended.err
        assert saved(folders) is None
        assert not (folders.run / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("names", "code", "finished"),
    [("SIGINT,SIGINT", 130, 2), ("SIGTERM,SIGINT", 130, 2), ("SIGTERM,SIGTERM", 143, 3), ("SIGINT,SIGTERM", 130, 3)],
)
def test_a_second_ctrl_c_stops_at_once_a_second_sigterm_not(
    zygote: Zygote, task: Path, tmp_path: Path, names: str, code: int, finished: int
) -> None:
    folders = Folders(tmp_path)
    ended = zygote.run(tmp_path, arguments(task, folders), fault=(names, *THIRD_STEP))
    assert ended.code == code, ended.err
    assert saved(folders) == len(folders.metrics()) == finished
    assert ("stopping now" in ended.err) == (finished == 2)
    assert f"--load {folders.actor}" in ended.out
    assert "Traceback" not in ended.err


def test_without_a_save_folder_the_screen_says_nothing_is_kept(zygote: Zygote, task: Path, tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    unsaved = ["--set", "checkpoint.save=null", "--set", "critic.critic_save=null"]
    argv = arguments(task, folders)
    for option in ("--save", "--critic-save", "--load", "--critic-load", "--save-interval"):
        at = argv.index(option)
        del argv[at : at + 2]
    ended = zygote.run(tmp_path, [*argv, *unsaved], fault=("SIGINT", *THIRD_STEP))
    assert ended.code == 130, ended.err
    assert "finishing step 3, then stopping (without --save nothing is kept)" in ended.err
    assert len(folders.metrics()) == 3
    assert "Nothing was saved: add --save DIR" in ended.out


def test_a_run_whose_folders_another_run_is_writing_is_refused(zygote: Zygote, task: Path, tmp_path: Path) -> None:
    first, second = Folders(tmp_path / "first"), Folders(tmp_path / "second")
    endless = ["--num-rollout", "100000", "--keep-checkpoints", "2"]
    pid = zygote.start(first.root, arguments(task, first, *endless))
    other = Zygote()
    try:
        zygote.wait_for((first.critic / layout.TRACKER_FILE).exists)
        third = Folders(tmp_path / "third")
        with claimed({third.run: "--run-dir"}):  # As a run does that has no steps yet.
            for option, holder, argv in (
                ("--run-dir", third, arguments(task, third, *endless)),
                ("--critic-save", first, arguments(task, first, *endless, "--run-dir", str(second.run))),
            ):
                ended = other.run(second.root, argv)
                assert ended.code == 2, ended.err
                assert f"where     {option} from {holder.root}" in ended.err
                assert "[folder-locked]" in ended.err
        ended = other.run(second.root, arguments(task, second, *endless, "--run-dir", str(first.run)))
        assert "[run-dir-in-use]" in ended.err, "its steps would be dropped"
    finally:
        other.close()
        os.kill(pid, signal.SIGINT)
        ended = zygote.wait(first.root)
    assert ended.code == 130, ended.err
    assert saved(first) == len(first.metrics())
