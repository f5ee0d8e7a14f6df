"""Held-out evaluations of a run: in its files, on the screen, in the summary; also when it is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_cli.checkpoint import layout
from relax_cli.quickstart.task import prepare
from relax_cli.tracking.evaluations import read_evaluations, read_samples
from tests.support.fault_runs import Folders, Zygote, arguments

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's task with two small held-out sets."""
    folder = tmp_path_factory.mktemp("task") / "quickstart"
    prepare(folder, seed=1, steps=3)
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


def options(task: Path) -> list[str]:
    sets = [word for name in ("one", "two") for word in ("--eval-prompt-data", f"{name}={task}/data/{name}.jsonl")]
    sampling = ["--eval-sampling", "two:temperature=0,n=2"]
    best = ["--keep-best", "eval/one/reward/mean", "--keep-checkpoints", "1"]
    return [*sets, *sampling, *best, "--eval-interval", "2", "--lr", "1e-3", "--format", "json"]


def without_clock(evaluations: list[Any]) -> list[Any]:
    return [(e.step, e.name, {k: v for k, v in e.metrics.items() if k != "seconds"}) for e in evaluations]


def test_every_evaluation_is_in_every_file_and_summary(zygote: Zygote, task: Path, tmp_path: Path) -> None:
    straight, split = Folders(tmp_path / "straight"), Folders(tmp_path / "split")
    ended = zygote.run(straight.root, [*arguments(task, straight), *options(task), "--num-rollout", "3"])
    assert ended.code == 0, ended.err
    records = [json.loads(line) for line in (straight.run / "metrics.jsonl").read_text().splitlines()]
    has_evaluation = [(r["step"], sorted({k.split("/")[1] for k in r if k.startswith("eval/")})) for r in records]
    assert has_evaluation == [(0, ["one", "two"]), (1, []), (2, ["one", "two"]), (3, ["one", "two"])]

    found = read_evaluations(straight.run)
    for evaluation in found:
        rows = read_samples(straight.run, evaluation)
        assert len(rows) == evaluation.metrics["samples"] == {"one": 40, "two": 20}[evaluation.name]
        assert sum(row["reward"] for row in rows) / len(rows) == evaluation.metrics["reward/mean"]
        if evaluation.name == "two":
            responses = [row["response"] for row in rows]
            assert responses[::2] == responses[1::2], "greedy"
            assert evaluation.metrics["pass@2"] == evaluation.metrics["majority@2"] == evaluation.metrics["pass@1"]
        assert f"step {evaluation.step}: held-out set {evaluation.name}, reward " in ended.err
    summary = json.loads(ended.out)
    assert [(e["step"], e["name"], e["reward/mean"]) for e in summary["evaluations"]] == [
        (e.step, e.name, e.metrics["reward/mean"]) for e in found
    ]
    assert (summary["eval_before"], summary["eval_after"]) == (
        found[0].metrics["reward/mean"],
        found[4].metrics["reward/mean"],
    )

    # The pair with the highest value stays besides the newest.
    value, _, step = max((e.metrics["reward/mean"], -e.step, e.step) for e in found if e.name == "one" and e.step)
    assert summary["best"] == {"metric": "eval/one/reward/mean", "value": value, "iteration": step}
    for role in (straight.actor, straight.critic):
        assert layout.list_iterations(role) == sorted({step, 3})
        assert layout.read_best(role) == layout.Best("eval/one/reward/mean", value, step)

    # Without a trainer the same samples and numbers come out, to the bit.
    alone = tmp_path / "alone"
    words = ["--recipe", str(straight.run / "config.json"), "--load", str(straight.actor), "--run-dir", str(alone)]
    ended = zygote.run(tmp_path / "eval", ["eval", *words, "--format", "json"])
    assert ended.code == 0, ended.err
    assert without_clock(read_evaluations(alone)) == without_clock(found[4:])
    assert [read_samples(alone, e) for e in found[4:]] == [read_samples(straight.run, e) for e in found[4:]]
    assert json.loads(ended.out)["evaluations"] == [e.dict() for e in read_evaluations(alone)]

    # Cut at a step that was not evaluated, the run does not evaluate it when it is resumed.
    for rollouts in ("1", "3"):
        constant = ["--set", "optimizer.lr_decay_style=constant"]
        ended = zygote.run(split.root, [*arguments(task, split), *options(task), *constant, "--num-rollout", rollouts])
        assert ended.code == 0, ended.err
    cut = without_clock(read_evaluations(split.run))
    assert [e for e in cut if e[0] != 1] == without_clock(found), "the last step of the shorter run was evaluated"
