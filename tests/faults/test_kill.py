"""`kill -9` at any instant of a run that saves every step: the newest pair resumes, and nothing is lost or repeated."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import pytest

from relax_cli.checkpoint import layout
from tests.support.fault_runs import STEPS, Folders, Zygote, arguments, assert_resumable

FIRST_SAVE = range(1, 70)
"""File operations in the save folders from the start of a run to the middle of its second save."""
LATER = range(70, 320)
CHAIN = 7
"""Kills that one chain of resumptions takes at most before it is let run to its end."""


def assert_equal(folders: Folders, straight: Folders, what: list[str]) -> None:
    """Every metric of every step and every sampled token, once."""
    assert [m["step"] for m in folders.metrics()] == list(range(1, STEPS + 1)), what
    assert folders.metrics() == straight.metrics(), what
    assert folders.samples() == straight.samples(), what


def killed_at_random(
    zygote: Zygote, argv: list[str], root: Path, rng: random.Random, seconds: float
) -> tuple[int, str]:
    """Start a run and kill it: most often in the middle of a save, else after some time. Its exit status, and how."""
    if rng.random() < 0.7:
        number = rng.choice(FIRST_SAVE if rng.random() < 0.7 else LATER)
        ended = zygote.run(root, argv, fault=("kill", "/saves/", number))
        return ended.code, f"file operation {number}"
    delay = rng.uniform(0.0, seconds)
    return zygote.run(root, argv, kill_after=delay).code, f"after {delay:.2f} s"


def campaign(zygote: Zygote, task: Path, straight: Folders, out: Path, *options: str, kills: int, seed: int) -> None:
    """Kill runs, each the resumption of the one before, until `kills` have died; every chain ends as `straight` did."""
    rng, chains, killed = random.Random(seed), 0, 0
    history: list[str] = []
    folders = Folders(out / "0")
    undisturbed = (straight.root / "stdout").stat().st_mtime - (straight.root / "started").stat().st_mtime
    while killed < kills or history:
        argv = arguments(task, folders, *options, *(["--keep-checkpoints", "1"] if chains % 2 else []))
        if killed < kills and len(history) < CHAIN:
            code, how = killed_at_random(zygote, argv, folders.root, rng, undisturbed)
        else:
            code, how = zygote.run(folders.root, argv).code, "to the end"
        assert code in (0, -signal.SIGKILL), (history, how, (folders.root / "stderr").read_text())
        history.append(how)
        iteration = assert_resumable(folders, f"seed {seed}: {history}")
        if code != 0:
            killed += 1
        if iteration == STEPS:
            # The last pair counts only once the last metrics are written, so even a kill at the end loses nothing.
            assert_equal(folders, straight, history)
            chains, history = chains + 1, []
            folders = Folders(out / str(chains))


INSTANTS = {
    "before the first trackers": ("actor/.latest_checkpointed", 1, 0),
    "between the first two trackers": ("critic/.latest_checkpointed", 1, 1),
    "between the final names": ("critic/iter_0000002", 1, 1),
    "after the metrics, before the trackers": ("actor/.latest_checkpointed", 3, 1),
    "between the two trackers": ("critic/.latest_checkpointed", 3, 2),
}
"""Path of the file operation that the kill comes before, how manieth, and the iteration that resumes."""


@pytest.mark.parametrize("options", [[], ["--async-save"]], ids=["", "async"])
@pytest.mark.parametrize("instant", INSTANTS)
def test_a_kill_at_an_instant_of_its_own(
    zygote: Zygote, task: Path, straight: Folders, tmp_path: Path, instant: str, options: list[str]
) -> None:
    where, number, iteration = INSTANTS[instant]
    folders = Folders(tmp_path)
    ended = zygote.run(tmp_path, arguments(task, folders, *options), fault=("kill", where, number))
    assert ended.code == -signal.SIGKILL
    assert assert_resumable(folders, instant) == iteration
    assert zygote.run(tmp_path, arguments(task, folders, *options)).code == 0
    assert_equal(folders, straight, [instant])


def test_thirty_kills_lose_no_finished_step_and_change_no_number(
    zygote: Zygote, task: Path, straight: Folders, tmp_path: Path
) -> None:
    campaign(zygote, task, straight, tmp_path, kills=30, seed=1)


def test_kills_while_a_thread_writes_lose_no_finished_step(
    zygote: Zygote, task: Path, straight: Folders, tmp_path: Path
) -> None:
    campaign(zygote, task, straight, tmp_path, "--async-save", kills=8, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", [[], ["--async-save"]], ids=["", "async"])
@pytest.mark.parametrize("seed", range(2, 7))
def test_forty_more_kills(
    zygote: Zygote, task: Path, straight: Folders, tmp_path: Path, seed: int, options: list[str]
) -> None:
    campaign(zygote, task, straight, tmp_path, *options, kills=40, seed=seed)


def test_what_a_kill_after_the_last_save_left_is_finished(
    zygote: Zygote, task: Path, straight: Folders, tmp_path: Path
) -> None:
    folders = Folders(tmp_path)
    shutil.copytree(straight.run, folders.run)
    shutil.copytree(straight.root / "saves", tmp_path / "saves")
    # Between the two trackers; one old checkpoint half removed, another not yet.
    layout.write_tracker(folders.critic, STEPS - 1)
    layout.iteration_folder(folders.actor, 1).rename(folders.actor / ".iter_0000001.tmp-old")
    heldout = ["--eval-prompt-data", f"heldout={task}/data/heldout.jsonl", "--keep-checkpoints", "2"]
    ended = zygote.run(tmp_path, [*arguments(task, folders), *heldout])
    assert ended.code == 0, ended.err
    assert "Held-out set `heldout`" in ended.err + ended.out
    assert "0 steps" in ended.err + ended.out
    for folder in (folders.actor, folders.critic):
        assert layout.read_tracker(folder) == layout.Tracker(STEPS)
        assert layout.list_iterations(folder) == [STEPS - 1, STEPS]
        assert layout.list_leftovers(folder) == []
    *before, last = folders.metrics()
    assert last["eval/heldout/samples"] > 0, "the evaluation joins the metrics of the last step"
    assert [*before, {k: v for k, v in last.items() if not k.startswith("eval/")}] == straight.metrics()
