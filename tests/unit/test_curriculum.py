"""Rows are drawn by their past rewards: the same for any number of workers, and after a resume."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_cli.checkpoint.sampling_state import FILE, read_sampling, write_sampling
from relax_cli.config.schema import BatchSection, Config
from relax_cli.data.curriculum import (
    USER_FILE,
    RowHistory,
    WeightedRows,
    learnability,
    load_curriculum,
    weights_of,
)
from relax_cli.engine.sampling import DrawnSampling
from relax_cli.engine.session import RolloutGroup
from relax_cli.errors import ConfigError, RelaxError, ResumeError
from relax_cli.plugin.records import BUILTIN_CURRICULUMS
from tests.support.rollout_workers import Workers

ROWS = 12


def history(*visited: tuple[int, float], rows: int = ROWS) -> RowHistory:
    return RowHistory.empty(rows).after(visited)


def test_a_history_is_a_mean_that_forgets() -> None:
    seen = history((1, 1.0), (1, 0.0), (2, 0.5), *[(3, 0.0)] * 4, (3, 1.0), (3, 1.0))
    assert seen.visits[:4].tolist() == [0, 2, 1, 6]
    assert seen.reward[:4].tolist() == [0.0, 0.5, 0.5, 0.4375]


def test_learnability_is_highest_at_one_half_and_never_0() -> None:
    seen = RowHistory(np.array([0, 1, 1, 1, 1, 1]), np.array([0.0, 0.5, 0.25, 0.0, 1.0, 7.0]))
    assert learnability(seen).tolist() == pytest.approx([1.0, 1.0, 0.1 + 0.9 * 0.75, 0.1, 0.1, 0.1])
    assert load_curriculum("learnability", BUILTIN_CURRICULUMS) is learnability


def weighted(weights: list[float], mixture: tuple[tuple[int, float], ...] = ()) -> WeightedRows:
    return WeightedRows("mine", lambda _: weights, 7, RowHistory.empty(len(weights)), mixture)


def test_rows_come_as_often_as_they_weigh() -> None:
    rows = weighted([3.0, 1.0, 0.0, 4.0])
    first = [rows.rows(rollout, 0, 1)[0] for rollout in range(4000)]
    assert np.bincount(first, minlength=4) / 4000 == pytest.approx([3 / 8, 1 / 8, 0, 4 / 8], abs=0.03)
    for rollout in range(20):
        drawn = rows.rows(rollout, 0, 4)
        assert sorted(drawn) == [0, 1, 2, 3], "each once"
        assert drawn[3] == 2, "a weight of 0 comes when nothing else is left"
        assert rows.rows(rollout, 0, 2) + rows.rows(rollout, 2, 4) == [*drawn, *drawn[:2]]
        assert weighted([3.0, 1.0, 0.0, 4.0]).rows(rollout, 0, 4) == drawn
    assert rows.effective_rows == pytest.approx(64 / 26)


def test_a_set_of_a_mixture_keeps_its_share() -> None:
    rows = weighted([1.0, 1.0, 100.0, 300.0], ((2, 3.0), (2, 1.0)))
    first = [rows.rows(rollout, 0, 1)[0] for rollout in range(4000)]
    assert np.bincount(first, minlength=4) / 4000 == pytest.approx([3 / 8, 3 / 8, 1 / 16, 3 / 16], abs=0.03)


def of_past(past: RowHistory) -> Any:
    return 1.0 + past.visits + past.reward


@pytest.mark.parametrize("dynamic", [False, True])
def test_neither_workers_nor_a_resume_change_what_is_drawn(dynamic: bool) -> None:
    batch = BatchSection(rollout_batch_size=4, n_samples_per_prompt=2, dynamic_sampling=dynamic)

    def run(workers: int, steps: range, past: RowHistory) -> tuple[list[Any], RowHistory, dict[str, float]]:
        ranks = Workers(workers, lambda row: row % 3 == 0)
        sampling = DrawnSampling(Config(batch=batch), 0, WeightedRows("mine", of_past, 5, past))
        kept, metrics = [], {}
        for rollout_id in steps:
            *_, metrics = sampling.generate(RolloutGroup(ranks), rollout_id)
            kept.append(ranks.kept)
            sampling.finish()
        state = sampling.position(RolloutGroup(ranks))["sampling"]
        learned = RowHistory(state["curriculum_visits"], state["curriculum_reward"])
        return kept, learned, {name: spread.mean for name, spread in metrics.items()}

    kept, learned, metrics = run(1, range(6), RowHistory.empty(ROWS))
    assert learned.visits.sum() == 24 if not dynamic else learned.visits.sum() > 24
    assert len({tuple(prompts) for _, _, prompts in (zip(*step, strict=True) for step in kept)}) > 1
    assert {0.5, 1.0} >= set(learned.reward[learned.visits > 0].tolist())
    assert metrics["curriculum/past_reward"] >= 0.5
    for workers in (2, 3):
        again, other, _ = run(workers, range(6), RowHistory.empty(ROWS))
        assert (again, other.reward.tolist()) == (kept, learned.reward.tolist())
    _, half, _ = run(2, range(3), RowHistory.empty(ROWS))
    rest, other, _ = run(3, range(3, 6), half)
    assert (rest, other.visits.tolist()) == (kept[3:], learned.visits.tolist())


BODIES = {
    "curriculum-syntax": ("", "curriculum.py"),
    "curriculum-function": ("def other(history): return history.reward", "curriculum.py:weights"),
    "curriculum-file": ("def weights(history):", "curriculum.py:weights"),
    "curriculum-failed": ("def weights(): return 1", "curriculum.py:weights"),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_file_that_is_no_curriculum_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body, spec = BODIES[kind]
    monkeypatch.chdir(tmp_path)
    Path("curriculum.py").write_text(body)
    with pytest.raises(ConfigError) as caught:
        load_curriculum(spec, {})
    assert [problem.id for problem in caught.value.problems] == [kind]


def test_a_file_is_tried_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "c.py").write_text("def good(past): return past.visits + 1\ndef bad(past): return past.visits[:1]\n")
    assert USER_FILE.check(f"{tmp_path}/c.py:good") == []
    (problem,) = USER_FILE.check(f"{tmp_path}/c.py:bad")
    assert (problem.id, problem.got) == ("curriculum-failed", "shape (1,) for 4 rows")


@pytest.mark.parametrize(
    ("weigh", "got"),
    [
        (lambda past: past.reward[:2], r"shape \(2,\) for 12 rows"),
        (lambda past: np.where(past.visits > 0, np.nan, 1.0), "weight nan of row 3"),
        (lambda past: 0.5 - past.visits, "weight -0.5 of row 3"),
        (lambda past: past.reward * 0, "all weights are 0"),
        (lambda past: past.nothing, "AttributeError"),
    ],
)
def test_what_are_no_weights_ends_the_run(weigh: Callable[[RowHistory], Any], got: str) -> None:
    with pytest.raises(RelaxError, match="gave no weights") as caught:
        weights_of("mine", weigh, history((3, 1.0)))
    (problem,) = caught.value.problems
    assert problem.id == "curriculum-failed"
    assert re.search(got, problem.got)


def test_a_curriculum_cannot_change_the_history() -> None:
    past = history((3, 1.0))

    def weigh(given: RowHistory) -> Any:
        given.reward[:] = 9
        return given.reward

    weights_of("mine", weigh, past)
    assert past.reward.max() == 1.0


def test_a_damaged_state_of_the_sampling_is_said(tmp_path: Path) -> None:
    assert read_sampling(tmp_path) == {}
    write_sampling(tmp_path, {"visits": np.arange(3)})
    assert read_sampling(tmp_path)["visits"].tolist() == [0, 1, 2]
    (tmp_path / FILE).write_bytes(b"\xff" * 20)
    with pytest.raises(ResumeError) as caught:
        read_sampling(tmp_path)
    assert [problem.id for problem in caught.value.problems] == ["checkpoint-sampling-unreadable"]
