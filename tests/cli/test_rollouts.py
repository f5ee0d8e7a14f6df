"""`relax rollouts`: samples are chosen, filtered and shown token by token; their text does nothing to a terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_cli.cli.screen import Screen
from relax_cli.tracking.run_files import TokenTexts, advantage, read_run, token_numbers
from relax_cli.tracking.sample_text import one_sample
from tests.support.cli_app import Invoke
from tests.support.run_folders import made_up_run, made_up_sample


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up_run(tmp_path_factory.mktemp("runs") / "run")


def rows(invoke: Invoke, run: Path, *words: str) -> list[int]:
    result = invoke("rollouts", str(run), *words, "--format", "json")
    assert result.exit_code == 0, result.stderr
    return [sample["row"] for sample in json.loads(result.stdout)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], [0, 1, 2, 3]),
        (["--worst", "2"], [1, 2]),
        (["--best", "1"], [0]),
        (["--filter", "reward>0"], [0]),
        (["--filter", "reward_parts.right<0.5", "--filter", "row!=3"], [1, 2]),
        (["--filter", "response~alert.1."], [1]),
        (["--filter", "finish_reason=length"], []),
        (["--filter", "length>=4", "--filter", "group=1"], [2, 3]),
        (["--filter", "advantage<0"], []),
        (["--group", "1"], [2, 3]),
        (["--group", "1", "--filter", "row=3"], [3]),
        (["--step", "1", "--worst", "1"], [1]),
    ],
)
def test_samples_are_chosen(invoke: Invoke, run: Path, words: list[str], expected: list[int]) -> None:
    assert rows(invoke, run, *words) == expected


def test_any_k_are_different_samples(invoke: Invoke, run: Path) -> None:
    assert len(set(rows(invoke, run, "--random", "3"))) == 3


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--filter", "rewrd<1"], "rollouts-filter"),
        (["--filter", "reward"], "rollouts-filter"),
        (["--filter", "reward<much"], "rollouts-filter"),
        (["--filter", "response~("], "rollouts-filter"),
        (["--sample", "9"], "rollouts-sample"),
        (["--group", "9"], "rollouts-sample"),
        (["--step", "9"], "samples-missing"),
        (["--evals"], "samples-missing"),
    ],
)
def test_a_wrong_choice_is_named(invoke: Invoke, run: Path, words: list[str], rule: str) -> None:
    result = invoke("rollouts", str(run), *words)
    assert result.exit_code == 2
    assert f"[{rule}]" in result.stderr


@pytest.mark.parametrize("text", [None, "{}", "[[[", '{"config": 1}'])
def test_a_folder_that_is_no_run_is_named(invoke: Invoke, text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    result = invoke("rollouts", str(tmp_path))
    assert result.exit_code == 2
    assert "[run-folder-missing]" in result.stderr


def test_the_run_next_to_a_wrong_folder_is_named(invoke: Invoke, run: Path) -> None:
    for wrong in (run.parent, run / "rollouts", run / "config.json"):
        assert f"for example {run}" in invoke("rollouts", str(wrong)).stderr


@pytest.mark.parametrize(
    "line", ['{"step": 1, gar', "\0\0", "[1]", "{}", '{"step": 1, "warnings": 3}', '{"step": 1, "eval/x": 3}']
)
def test_a_damaged_line_of_metrics_is_named(invoke: Invoke, tmp_path: Path, line: str) -> None:
    with (made_up_run(tmp_path / "run", steps=2) / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    shown = invoke("report", str(tmp_path / "run"))
    assert shown.exit_code == 2
    assert "metrics.jsonl:4" in shown.stderr


def test_a_damaged_tokenizer_of_a_run_is_named(invoke: Invoke, tmp_path: Path) -> None:
    (made_up_run(tmp_path / "run") / "tokenizer.json").write_text("{}")
    shown = invoke("rollouts", str(tmp_path / "run"), "--sample", "1")
    assert (shown.exit_code, "tokenizer.json" in shown.stderr) == (2, True)


def test_text_of_others_does_nothing(invoke: Invoke, run: Path) -> None:
    for words in ([], ["--sample", "1"], ["--group", "0"]):
        shown = invoke("rollouts", str(run), *words).stdout
        assert "[bold]x[/bold] \\x1b[31m" in shown.replace("\n", " ") or words == ["--group", "0"]
        assert "\x1b" not in shown
        assert "\u202e" not in shown


def test_numbers_of_a_token_are_those_of_training() -> None:
    sample = made_up_sample(0, 1.0)
    numbers = token_numbers(sample)
    np.testing.assert_allclose(numbers["ratio"], [1, 2, np.nan, 1], rtol=1e-6)
    np.testing.assert_array_equal(numbers["reward"], np.float32([np.nan, np.nan, np.nan, 1]))
    assert np.isnan(numbers["advantages"][2])
    assert advantage(sample) == pytest.approx(0.5 / 3)
    paid = sample | {"token_rewards": np.float32([0, 0.5, 0, 1])}
    np.testing.assert_array_equal(token_numbers(paid)["reward"], np.float32([np.nan, 0.5, np.nan, 1]))
    bare = {k: v for k, v in sample.items() if not isinstance(v, np.ndarray) or k.endswith("_ids")}
    assert list(token_numbers(bare)) == ["reward"]
    assert advantage(bare) is None


def test_credit_is_coloured_and_observations_are_grey(tmp_path: Path) -> None:
    screen = Screen(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=100)
    painted: Any = one_sample(made_up_sample(0, 1.0) | {"length": 4}, TokenTexts(tmp_path / "none"))[5]
    spans = [span.style for span in painted.spans]
    best, worst, observed, good = spans
    assert best.bgcolor.triplet.green > good.bgcolor.triplet.green > 60
    assert worst.bgcolor.triplet.red > 200
    assert observed.dim
    assert observed.bgcolor is None
    screen.print(painted)


def test_a_line_that_is_being_written_is_left_out(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step"')
    assert read_run(tmp_path).metrics == [{"step": 1}]
