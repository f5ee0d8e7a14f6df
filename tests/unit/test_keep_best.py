"""`--keep-best`: the best pair stays through rotation, a resume and `prune`, and the commands show it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from relax_cli.checkpoint import layout
from relax_cli.cli.app import build_app
from relax_cli.config.schema import CheckpointSection, Config, CriticSection
from relax_cli.engine.saving import PairSaver
from relax_cli.engine.session import Ranks, TrainedGroup
from relax_cli.plugin.manager import load_plugins
from tests.support import checkpoints

METRIC = "eval/h/pass@1"


class OnDisk(Ranks[Any]):
    """A role whose checkpoints are real folders without a model."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name)
        self.folder = folder

    def start(self, request: Callable[[Any], Any]) -> Callable[[], list[Any]]:
        request(self)
        return lambda: [None]

    def on(self, rank: int, request: Callable[[Any], Any]) -> Any:
        raise AssertionError

    def tell(self, request: Callable[[Any], Any]) -> None:
        raise AssertionError

    def wake(self) -> None: ...
    def sleep(self) -> None: ...

    def write_checkpoint(self, iteration: int, meta: dict[str, Any]) -> None:
        checkpoints.save(self.folder, self.name, iteration, **meta)
        layout.iteration_folder(self.folder, iteration).rename(layout.temporary_folder(self.folder, iteration))


def saver(root: Path, first: int = 0, metric: str = METRIC) -> PairSaver:
    """Of a run that continues after iteration `first` and keeps the newest pair."""
    roles = [TrainedGroup(OnDisk(role, root / role)) for role in ("actor", "critic")]
    section = CheckpointSection(save=str(root / "actor"), keep_checkpoints=1, keep_best=metric)
    config = Config(checkpoint=section, critic=CriticSection(critic_save=str(root / "critic")))
    pair = PairSaver(roles, config, {}, warn=pytest.fail)
    pair.take_over_best(first)
    return pair


def train(pair: PairSaver, values: dict[int, float]) -> None:
    """Save each iteration and evaluate it."""
    for iteration, value in values.items():
        pair.prepare(iteration)
        pair.publish()
        if pair.is_best({METRIC: value}):
            pair.keep_best(iteration, {METRIC: value})


def left(root: Path) -> list[int]:
    found = [layout.list_iterations(root / role) for role in ("actor", "critic")]
    assert found[0] == found[1]
    return found[0]


def test_the_best_pair_outlives_newer_ones(tmp_path: Path) -> None:
    pair = saver(tmp_path)
    train(pair, {1: 0.1, 2: 0.7, 3: 0.3, 4: 0.7, 5: math.nan})
    assert left(tmp_path) == [2, 5], "an equal value does not replace it, NaN is none"
    assert layout.read_best(tmp_path / "critic") == layout.Best(METRIC, 0.7, 2)
    train(pair, {6: 0.8, 7: 0.2})
    assert left(tmp_path) == [6, 7]


def test_a_resumed_run_goes_by_the_same_best(tmp_path: Path) -> None:
    train(saver(tmp_path), {1: 0.1, 2: 0.7, 3: 0.3})
    train(saver(tmp_path, 3), {4: 0.6})
    assert left(tmp_path) == [2, 4]
    # What is newer than the iteration resumed from runs again, and another metric says nothing of this one.
    assert saver(tmp_path, 1).best is None
    assert saver(tmp_path, 4, "eval/h/reward/mean").best is None


def test_a_step_that_is_not_saved_is_not_the_best(tmp_path: Path) -> None:
    pair = saver(tmp_path)
    pair.keep_best(1, {METRIC: 1.0})
    assert pair.best is None
    assert layout.read_best(tmp_path / "actor") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", "x" * 5000, '{"metric": "m", "value": "1", "iteration": 1}'])
def test_a_note_that_cannot_be_understood_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / layout.BEST_FILE).write_text(text)
    assert layout.read_best(tmp_path) is None


def test_commands_show_the_best_and_prune_keeps_it(tmp_path: Path) -> None:
    actor, critic = str(tmp_path / "actor"), str(tmp_path / "critic")
    for folder in (actor, critic):
        checkpoints.save(Path(folder), Path(folder).name, 1, 2, 3, critic_save=critic, save_id="one")
        layout.write_best(Path(folder), layout.Best(METRIC, 0.5, 1))

    def relax(*words: str) -> str:
        result = CliRunner().invoke(build_app(load_plugins()), ["checkpoint", *words])
        assert result.exit_code == 0, result.output
        return result.stdout

    rows = {row["iteration"]: row["best"] for row in json.loads(relax("list", actor, "--format", "json"))}
    assert rows == {1: True, 2: False, 3: False}
    said = f"iteration 1 is the best by {METRIC} (0.5)"
    assert said in relax("list", actor)
    resume = ["check-resume", "--load", actor, "--critic-load", critic]
    assert said in relax(*resume)
    assert json.loads(relax(*resume, "--format", "json"))["best"]["iteration"] == 1
    relax("prune", actor, "--critic", critic, "--keep", "1", "--yes")
    assert left(tmp_path) == [1, 3]
