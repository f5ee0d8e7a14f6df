"""Held-out evaluations of a run: in its files and its summary; resumed, killed, and without a trainer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relax_cli.checkpoint import layout
from relax_cli.tracking.run_files import Evaluation, read_run, read_samples
from tests.support.cli_runs import read_metrics
from tests.support.fault_runs import Ended, Folders, Zygote, arguments
from tests.support.quickstart import small_task

pytestmark = pytest.mark.timeout(300)
KEPT = "eval/one/reward/mean"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's task with two small held-out sets."""
    folder = small_task(tmp_path_factory.mktemp("task") / "quickstart")
    rows = (folder / "data/heldout.jsonl").read_text().splitlines(keepends=True)
    (folder / "data/one.jsonl").write_text("".join(rows[:40]))
    (folder / "data/two.jsonl").write_text("".join(rows[40:50]))
    return folder


@pytest.fixture(scope="module")
def zygote() -> Any:
    """Starts runs."""
    zygote = Zygote()
    yield zygote
    zygote.close()


@dataclass(frozen=True)
class Straight:
    """A run that nothing happened to."""

    folders: Folders
    ended: Ended
    summary: dict[str, Any]
    found: list[Evaluation]


@pytest.fixture(scope="module")
def straight(zygote: Zygote, task: Path, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    folders = Folders(tmp_path_factory.mktemp("straight"))
    ended = zygote.run(folders.root, command(task, folders))
    assert ended.code == 0, ended.err
    return Straight(folders, ended, json.loads(ended.out), read_run(folders.run).evaluations)


def command(task: Path, folders: Folders, rollouts: int = 3) -> list[str]:
    sets = [word for name in ("one", "two") for word in ("--eval-prompt-data", f"{name}={task}/data/{name}.jsonl")]
    own = ["--eval-sampling", "two:temperature=0,n=2", "--eval-interval", "2", "--lr", "1e-3"]
    best = ["--keep-best", KEPT, "--keep-checkpoints", "1", "--set", "optimizer.lr_decay_style=constant"]
    return [*arguments(task, folders), *sets, *own, *best, "--format", "json", "--num-rollout", str(rollouts)]


def without_clock(evaluations: list[Evaluation]) -> list[Any]:
    return [(e.step, e.name, {k: v for k, v in e.metrics.items() if k != "seconds"}) for e in evaluations]


def test_an_evaluation_is_in_every_file_and_summary(straight: Straight) -> None:
    records = [json.loads(line) for line in (straight.folders.run / "metrics.jsonl").read_text().splitlines()]
    has_evaluation = [(r["step"], sorted({k.split("/")[1] for k in r if k.startswith("eval/")})) for r in records]
    assert has_evaluation == [(0, ["one", "two"]), (1, []), (2, ["one", "two"]), (3, ["one", "two"])]
    for evaluation in straight.found:
        rows = read_samples(straight.folders.run, evaluation)
        assert len(rows) == evaluation.metrics["samples"] == {"one": 40, "two": 20}[evaluation.name]
        assert sum(row["reward"] for row in rows) / len(rows) == evaluation.metrics["reward/mean"]
        if evaluation.name == "two":
            responses = [row["response"] for row in rows]
            assert responses[::2] == responses[1::2], "greedy"
            assert evaluation.metrics["pass@2"] == evaluation.metrics["majority@2"] == evaluation.metrics["pass@1"]
        assert f"step {evaluation.step}: held-out set {evaluation.name}, reward " in straight.ended.err
    assert straight.summary["evaluations"] == [e.dict() for e in straight.found]
    first, last = straight.found[0].metrics["reward/mean"], straight.found[4].metrics["reward/mean"]
    assert (straight.summary["eval_before"], straight.summary["eval_after"]) == (first, last)


def test_the_best_pair_stays_besides_the_newest(straight: Straight) -> None:
    values = [(e.metrics["reward/mean"], -e.step, e.step) for e in straight.found if e.name == "one" and e.step]
    value, _, step = max(values)
    assert straight.summary["best"] == {"metric": KEPT, "value": value, "iteration": step}
    for folder in (straight.folders.actor, straight.folders.critic):
        assert layout.list_iterations(folder) == sorted({step, 3})
        assert layout.read_best(folder) == layout.Best(KEPT, value, step)


def test_without_a_trainer_the_numbers_are_the_same(zygote: Zygote, straight: Straight, tmp_path: Path) -> None:
    folders, last = straight.folders, straight.found[4:]
    words = ["--recipe", str(folders.run / "config.json"), "--load", str(folders.actor), "--run-dir", str(tmp_path)]
    ended = zygote.run(tmp_path / "eval", ["eval", *words, "--format", "json"])
    assert ended.code == 0, ended.err
    alone = read_run(tmp_path).evaluations
    assert without_clock(alone) == without_clock(last)
    assert [read_samples(tmp_path, e) for e in last] == [read_samples(folders.run, e) for e in last]
    assert json.loads(ended.out)["evaluations"] == [e.dict() for e in alone]


def test_a_resumed_run_evaluates_what_is_due(zygote: Zygote, task: Path, straight: Straight, tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    for rollouts in (1, 3):
        ended = zygote.run(folders.root, command(task, folders, rollouts))
        assert ended.code == 0, ended.err
    cut = without_clock(read_run(folders.run).evaluations)
    assert [e for e in cut if e[0] != 1] == without_clock(straight.found), "step 1 was the last of the shorter run"


@pytest.mark.parametrize("where", ["run/.metrics.jsonl.tmp", "best_checkpoint"])
def test_a_run_killed_while_it_evaluates_repeats_it(
    zygote: Zygote, task: Path, straight: Straight, tmp_path: Path, where: str
) -> None:
    folders = Folders(tmp_path)
    killed = zygote.run(folders.root, command(task, folders), fault=("kill", where, 1))
    assert killed.code == -9, killed.err
    assert layout.read_tracker(folders.actor) == layout.Tracker(2), "the step counts before it is evaluated"
    ended = zygote.run(folders.root, command(task, folders))
    assert ended.code == 0, ended.err
    assert read_metrics(folders.root) == read_metrics(straight.folders.root)
    assert json.loads(ended.out)["best"] == straight.summary["best"]
    assert layout.list_iterations(folders.critic) == layout.list_iterations(straight.folders.critic)
