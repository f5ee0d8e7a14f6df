"""A disk that is full, broken or protected during a save: the previous pair stays current, and the screen says so."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_cli.checkpoint import layout
from relax_cli.checkpoint.resume import examine_resume
from tests.support.fault_runs import Ended, Folders, Zygote, arguments

PARTS = {
    "actor-shards": ("actor/.iter_0000002.tmp/__0_0.distcp", 1),
    "actor-common": ("actor/.iter_0000002.tmp/common.pt", 1),
    "actor-metadata": ("actor/.iter_0000002.tmp/.metadata.tmp", 1),
    "actor-relax-json": ("actor/.iter_0000002.tmp/.relax.json.tmp", 1),
    "critic-shards": ("critic/.iter_0000002.tmp/__0_0.distcp", 1),
    "critic-relax-json": ("critic/.iter_0000002.tmp/.relax.json.tmp", 1),
    "actor-tracker": ("actor/.latest_checkpointed_iteration.txt.tmp", 3),
    "critic-tracker": ("critic/.latest_checkpointed_iteration.txt.tmp", 3),
}
"""The second save, part by part: which path is about to be opened, and the how manieth time."""


def assert_pair(folders: Folders, iteration: int) -> None:
    """The pair of `iteration` is current and whole, and nothing of a newer one lies about."""
    report = examine_resume(str(folders.actor), str(folders.critic), has_critic=True, deep=True)
    assert not report.problems
    assert report.decision.iteration == iteration
    for folder in (folders.actor, folders.critic):
        assert layout.read_tracker(folder).iteration == iteration
        assert layout.list_iterations(folder)[-1] == iteration
        assert not layout.list_leftovers(folder)


def assert_as_straight(folders: Folders, straight: Folders, *, steps: int, unsaved: list[int]) -> None:
    """The run went on as if nothing had happened, and its metrics tell which iterations were not saved."""
    metrics = folders.metrics()
    warned = [warning["seen"] for record in metrics for warning in record.pop("warnings", ())]
    assert metrics == straight.metrics()[:steps]
    told = [text.partition(":")[0] for text in warned if "is not saved" in text]
    assert told == [f"iteration {number} is not saved" for number in unsaved]


def assert_four_parts(ended: Ended, folders: Folders, reason: str) -> None:
    """What is wrong, where, what to do; then the command that goes on."""
    assert ended.code == 1, ended.err
    assert "[storage-failed]" in ended.err
    assert reason in ended.err
    assert "the previous checkpoint is intact" in ended.err
    assert f"--load {folders.actor}" in ended.err
    assert "Traceback" not in ended.err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Folders]:
    """Save folders on a disk of their own, with room for a few pairs."""
    folders = Folders(tmp_path)
    mount_point = tmp_path / "saves"
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=96m", "relax-test", str(mount_point)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs the command `mount`")
    if done.returncode:
        pytest.skip(f"needs the right to mount a tmpfs (root): {done.stderr.strip()}")
    yield folders
    subprocess.run(["umount", "-l", str(mount_point)], check=True)


@pytest.mark.parametrize(
    ("part", "options"),
    [*((part, []) for part in PARTS), *((part, ["--async-save"]) for part in ("actor-shards", "critic-relax-json"))],
)
def test_a_full_disk_in_a_save_keeps_the_previous_pair(
    zygote: Zygote, task: Path, straight: Folders, small_disk: Folders, part: str, options: list[str]
) -> None:
    keep_one = ["--keep-checkpoints", "1", "--on-save-error", "continue", *options]
    fault = (f"fill {small_disk.root / 'saves' / 'filler'}", *PARTS[part])
    ended = zygote.run(small_disk.root, arguments(task, small_disk, *keep_one, "--num-rollout", "3"), fault=fault)
    assert ended.code == 0, ended.err
    (warning,) = [line for line in ended.err.splitlines() if "is not saved" in line]
    assert "warning: iteration 2 is not saved" in warning
    assert "No space left on device" in warning
    assert_pair(small_disk, 3)
    assert_as_straight(small_disk, straight, steps=3, unsaved=[2])


@pytest.mark.parametrize(
    ("part", "options"),
    [
        *((part, []) for part in ("actor-common", "actor-relax-json", "critic-shards", "critic-tracker")),
        ("critic-shards", ["--async-save"]),
        ("critic-tracker", ["--async-save"]),
    ],
)
def test_a_broken_disk_in_a_save_ends_with_the_previous_pair(
    zygote: Zygote, task: Path, tmp_path: Path, part: str, options: list[str]
) -> None:
    folders = Folders(tmp_path)
    argv = arguments(task, folders, "--num-rollout", "3", *options)
    ended = zygote.run(tmp_path, argv, fault=("eio", *PARTS[part]))
    assert_four_parts(ended, folders, "Input/output error")
    assert_pair(folders, 1)


@pytest.mark.parametrize("asked", ["stop", "continue"])
def test_a_disk_that_stays_full_ends_the_run_or_goes_on_as_asked(
    zygote: Zygote, task: Path, straight: Folders, small_disk: Folders, asked: str
) -> None:
    fault = (f"stay-full {small_disk.root / 'saves' / 'filler'}", "critic/.iter_0000002.tmp/__0_0.distcp", 1)
    options = ["--keep-checkpoints", "1", "--on-save-error", asked, "--num-rollout", "4"]
    ended = zygote.run(small_disk.root, arguments(task, small_disk, *options), fault=fault)
    assert_pair(small_disk, 1)
    free = os.statvfs(small_disk.actor)
    assert free.f_bfree * free.f_bsize > 5e6, "the half that was written gave its room back"
    if asked == "stop":
        assert_four_parts(ended, small_disk, "No space left on device")
        assert "--num-rollout 4" in ended.err
        assert small_disk.metrics() == straight.metrics()[:1]
    else:
        assert ended.code == 0, ended.err
        assert ended.err.count("is not saved") == 3, "once for each of the steps 2, 3 and 4"
        assert_as_straight(small_disk, straight, steps=4, unsaved=[2, 3, 4])
        assert "Saved     iteration 1" in ended.out


def test_lost_write_permission_ends_with_the_previous_pair(zygote: Zygote, task: Path, tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    zygote.start(tmp_path, arguments(task, folders, "--num-rollout", "1000"), ordinary=True)
    zygote.wait_for((folders.critic / layout.TRACKER_FILE).exists)
    folders.critic.chmod(0o555)
    ended = zygote.wait(tmp_path)
    folders.critic.chmod(0o755)
    assert_four_parts(ended, folders, "Permission denied")
    last = len(folders.metrics())
    report = examine_resume(str(folders.actor), str(folders.critic), has_critic=True, deep=True)
    assert report.decision.iteration in (last - 1, last)


def test_unwritable_folders_are_refused_before_anything_starts(zygote: Zygote, task: Path, tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    (tmp_path / "saves").mkdir()
    (tmp_path / "saves").chmod(0o555)
    ended = zygote.run(tmp_path, arguments(task, folders), ordinary=True)
    assert ended.code == 2, ended.err
    assert "[folder-read-only]" in ended.err
    assert not folders.run.exists()


def test_a_full_run_folder_ends_the_run_clearly_and_it_resumes(
    zygote: Zygote, task: Path, straight: Folders, small_disk: Folders, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folders = Folders(tmp_path_factory.mktemp("on-another-disk"))
    run_dir, filler = small_disk.root / "saves" / "run", small_disk.root / "saves" / "filler"
    moved = ["--run-dir", str(run_dir), "--num-rollout", "3", "--keep-checkpoints", "1"]
    fault = (f"stay-full {filler}", "run/rollouts/.step_000002", 1)
    ended = zygote.run(folders.root, arguments(task, folders, *moved), fault=fault)
    assert ended.code == 1, ended.err
    assert "Traceback" not in ended.err
    assert "No space left on device" in ended.err
    assert "[run-folder-failed]" in ended.err
    assert f"--load {folders.actor}" in ended.err
    assert_pair(folders, 1)
    filler.unlink()
    assert zygote.run(folders.root, arguments(task, folders, *moved)).code == 0
    assert_pair(folders, 3)


PLACES = {
    "config": "run/.config.json.tmp",
    "metrics": "run/metrics.jsonl",
    "folder-of-samples": "run/rollouts",
    "samples": "run/rollouts/.step_000001",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_failed_before_its_first_step_starts_again(
    zygote: Zygote, task: Path, straight: Folders, tmp_path: Path, place: str
) -> None:
    folders = Folders(tmp_path)
    argv = arguments(task, folders, "--num-rollout", "1")[:-6]
    argv += ["--num-rollout", "1"]
    ended = zygote.run(tmp_path, argv, fault=("eio", PLACES[place], 1))
    assert ended.code == 1, ended.err
    assert "[run-folder-failed]" in ended.err
    assert "Input/output error" in ended.err
    assert "bug" not in ended.err
    again = zygote.run(tmp_path, argv)
    assert again.code == 0, again.err
    assert folders.metrics() == straight.metrics()[:1]


def test_a_run_folder_that_goes_away_is_named_with_a_way_on(zygote: Zygote, task: Path, tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    argv = arguments(task, folders, "--num-rollout", "3")
    ended = zygote.run(tmp_path, argv, fault=(f"move {folders.run}", "run/rollouts/.step_000002", 1))
    assert ended.code == 1, ended.err
    assert "[run-folder-failed]" in ended.err
    assert "removed or renamed" in ended.err
    assert "bug" not in ended.err
    assert resumed(zygote, tmp_path, ended).code == 0
    assert_pair(folders, 3)


@pytest.mark.parametrize(
    ("moved", "place"),
    [
        ("actor", "actor/.iter_0000002.tmp/common.pt"),
        ("actor", "critic/.iter_0000002.tmp/common.pt"),
        ("critic", "critic/.iter_0000002.tmp/common.pt"),
    ],
)
def test_a_save_folder_that_goes_away_is_not_called_intact(
    zygote: Zygote, task: Path, tmp_path: Path, moved: str, place: str
) -> None:
    folders = Folders(tmp_path)
    gone = folders.actor if moved == "actor" else folders.critic
    ended = zygote.run(tmp_path, arguments(task, folders, "--num-rollout", "3"), fault=(f"move {gone}", place, 1))
    assert ended.code == 1, ended.err
    assert "bug" not in ended.err
    assert "intact" not in ended.err
    assert str(gone) in ended.err
    assert "there is nothing to resume from" in ended.err


def resumed(zygote: Zygote, root: Path, ended: Ended) -> Ended:
    """The run after the command that an interrupted one printed."""
    (line,) = [line for line in ended.err.splitlines() if line.strip().startswith("relax train")]
    return zygote.run(root, shlex.split(line)[1:])
