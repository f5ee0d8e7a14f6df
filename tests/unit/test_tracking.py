"""The files of a run folder, and plots in text."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from relax_cli.config.schema import Config
from relax_cli.engine.trainer import Recorder
from relax_cli.errors import ResumeError
from relax_cli.plugin.manager import Plugins
from relax_cli.plugin.trackers import TrackedRun
from relax_cli.roles.sample_files import SampleWriter, drop_samples, sample_files
from relax_cli.tracking.live import StepDisplay
from relax_cli.tracking.numbers import curve
from relax_cli.tracking.run_files import MetricsWriter, read_run, write_config
from relax_cli.tracking.trackers import Trackers


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- files ---------------------------------------------------------------------------------------------------------


def test_every_step_is_readable_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 1, "pg_loss": 0.5, "phase_seconds": {"rollout": 1.5}})
        text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "pg_loss": 0.5, "phase_seconds": {"rollout": 1.5}}\n'


def test_numbers_json_does_not_know_become_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 1, "a": math.nan, "deep": {"b": -math.inf}, "list": [1.0, math.inf]})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 1,
        "a": None,
        "deep": {"b": None},
        "list": [1.0, None],
    }


@pytest.mark.parametrize("step", [1, 3])
def test_a_step_that_repeats_or_skips_is_refused(tmp_path: Path, step: int) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 1})
        with pytest.raises(AssertionError, match="step 2 is due"):
            writer.write({"step": step})
    assert steps_in(tmp_path) == [1]


def test_resuming_drops_what_an_aborted_run_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "run": 1}}\n' for step in range(1, 6)) + '{"step": 6, "ru')
    with MetricsWriter(tmp_path, done=3) as writer:
        writer.write({"step": 4, "run": 2})
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["run"]) for r in records] == [(1, 1), (2, 1), (3, 1), (4, 2)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_an_evaluation_joins_the_metrics_of_its_step(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        assert writer.last is None
        writer.write({"step": 0, "time": 1.0, "eval/a/reward/mean": 0.1})
        for step in (1, 2):
            writer.write({"step": step, "time": 2.0, "loss": math.nan})
        writer.write({"step": 2, "time": 3.0, "eval/a/reward/mean": 0.5})
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records[2:] == [{"step": 2, "time": 2.0, "loss": None, "eval/a/reward/mean": 0.5}]
    assert [record["step"] for record in records] == [0, 1, 2]

    with MetricsWriter(tmp_path, done=2) as writer:
        assert writer.last == records[2]
        writer.write({"step": 2, "time": 4.0, "eval/b/reward/mean": 0.7})
        writer.write({"step": 3, "time": 5.0})
    write_config(tmp_path, {"config": {}})
    assert [(e.step, e.name, e.metrics["reward/mean"]) for e in read_run(tmp_path).evaluations] == [
        (0, "a", 0.1),
        (2, "a", 0.5),
        (2, "b", 0.7),
    ]


def test_a_warning_joins_the_next_step_or_the_last(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.warn("before the first")
        writer.write({"step": 1, "warnings": [{"id": "x", "seen": "a symptom"}]})
        writer.write({"step": 2})
        writer.warn("after the second")
        writer.write({"step": 2, "eval/a/reward/mean": 0.5})
        writer.write({"step": 3})
        writer.warn("at the end")
    path = tmp_path / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [[one["seen"] for one in record.get("warnings", ())] for record in records] == [
        ["a symptom", "before the first"],
        [],
        ["after the second", "at the end"],
    ]


def test_a_run_that_failed_keeps_its_lines_as_they_are(tmp_path: Path) -> None:
    path, error = tmp_path / "metrics.jsonl", OSError("full")
    writer = MetricsWriter(tmp_path)
    writer.write({"step": 1})
    with path.open("a") as torn:
        torn.write('{"step": 2, "lo')
    writer.warn("the disk is full")
    writer.__exit__(OSError, error, None)
    assert path.read_text() == '{"step": 1}\n{"step": 2, "lo'


def test_the_screen_and_the_metrics_get_every_warning(tmp_path: Path) -> None:
    shown: list[str] = []
    display = cast(StepDisplay, SimpleNamespace(show=lambda _: None, warn=shown.append))
    failed = SimpleNamespace(message="the hook failed", got="no network")
    plugins = cast(Plugins, SimpleNamespace(step_end=lambda *_: [failed]))
    with MetricsWriter(tmp_path) as metrics:
        trackers = Trackers([], TrackedRun(tmp_path, {}), shown.append)
        recorder = Recorder(metrics, display, plugins, Config(), tmp_path)
        recorder.trackers = trackers
        recorder.step(1, {"warnings": [{"id": "flat", "seen": "no rise", "look_at": "the samples"}]})
        recorder.step(2, {})
    assert shown == ["no rise; look at the samples [flat]", *["the hook failed: no network"] * 2]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [[one["seen"] for one in record["warnings"]] for record in records] == [
        ["no rise"],
        ["the hook failed: no network"] * 2,
    ]


@pytest.mark.parametrize(("done", "kept"), [(0, []), (1, [0, 1])])
def test_a_run_that_starts_over_forgets_its_evaluation(tmp_path: Path, done: int, kept: list[int]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/a/reward/mean": 0.1}\n{"step": 1}\n')
    for folder in ("evals", "rollouts"):
        (tmp_path / folder).mkdir()
    (tmp_path / "evals/step_000000.jsonl").touch()
    (tmp_path / "rollouts/step_000001.jsonl").touch()
    MetricsWriter(tmp_path, done).close()
    drop_samples(tmp_path, done)
    assert steps_in(tmp_path) == kept
    assert [int(p.stem[-6:]) for p in sorted(tmp_path.glob("*/step_*"))] == kept


def test_a_torn_line_just_before_the_resumed_step_is_a_gap(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    with pytest.raises(ResumeError) as caught:
        MetricsWriter(tmp_path, done=2)
    assert caught.value.problems[0].got == "last step 1"


def test_resuming_in_a_new_folder_begins_at_the_resumed_step(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, done=6) as writer:
        writer.write({"step": 7})
    with MetricsWriter(tmp_path, done=7) as writer:
        writer.write({"step": 8})
    assert steps_in(tmp_path) == [7, 8]


@pytest.mark.parametrize("line", ["garbage", '{"step": 4}', "[1]", '{"loss": 1}', "[" * 100_000, "null", "1" * 5000])
def test_a_damaged_metrics_file_is_refused_by_line(tmp_path: Path, line: str) -> None:
    text = f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ResumeError) as caught:
        MetricsWriter(tmp_path, done=3)
    assert caught.value.problems[0].where == f"{tmp_path / 'metrics.jsonl'}:2"
    assert (tmp_path / "metrics.jsonl").read_text() == text


@pytest.mark.parametrize("content", [b'{"step": 0}\n\xff\xfe\n', None])
def test_a_metrics_file_that_is_not_text_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "metrics.jsonl"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(ResumeError) as caught:
        MetricsWriter(tmp_path, done=1)
    (problem,) = caught.value.problems
    assert (problem.id, problem.where, problem.fix) == ("metrics-file", str(path), f"--run-dir {tmp_path}-2")


def test_files_are_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    code = r"""
import sys
from pathlib import Path
from relax_cli.tracking.run_files import MetricsWriter, write_config
folder = Path(sys.argv[1])
for step in (1, 2):
    with MetricsWriter(folder, step - 1) as writer:
        writer.write({"step": step, "reward/part/\u00fc": 1.0})
write_config(folder, {"name": "\u00fc"})
"""
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=plain)
    assert (tmp_path / "metrics.jsonl").read_text("utf-8").count("ü") == 2
    assert "ü" in (tmp_path / "config.json").read_text("utf-8")


def test_resuming_deletes_samples_of_steps_that_run_again(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path)
    SampleWriter(tmp_path, "evals").write(3, [])
    for step in range(1, 5):
        writer.write(step, [])
    drop_samples(tmp_path, 2)
    assert list((tmp_path / "evals").iterdir()) == []
    assert list(sample_files(tmp_path)) == [1, 2]


def test_the_configuration_is_written_as_it_was_dumped(tmp_path: Path) -> None:
    dump = {"optimizer": {"lr": 1e-6}, "rollout": {"rollout_stop": ["é"]}}
    assert json.loads(write_config(tmp_path / "new", dump).read_text()) == dump


# --- plots ---------------------------------------------------------------------------------------------------------


def test_a_curve_leaves_gaps_and_draws_a_constant_series() -> None:
    gap = [line.split("┤")[1].ljust(3)[1] for line in curve([0.0, math.nan, 7.0], 20, 3)]
    assert gap == [" ", " ", " "]
    assert [line.count("█") for line in curve([3.0, 3.0, 3.0], 20, 4)] == [0, 0, 3, 3]
    assert curve([], 20, 2) == [" ┤", " ┤"]


def test_a_curve_fills_its_height_and_is_labelled() -> None:
    lines = curve([0.0, 0.5, 1.0], 20, 4)
    assert [line.split("┤")[0].strip() for line in lines] == ["1", "", "", "0"]
    columns = [line.split("┤")[1].ljust(3) for line in lines]
    heights = [sum(row[i] != " " for row in columns) for i in range(3)]
    assert heights == [1, 3, 4] or heights == [1, 2, 4]
    assert columns[0][2] == "█"
    assert columns[3][0] == "▁"


@pytest.mark.parametrize("values", [[], [math.nan], [2.0], [1e-9, 1e9] * 300])
def test_a_curve_never_passes_its_bounds(values: list[float]) -> None:
    lines = curve(values, 40, 5)
    assert len(lines) == 5
    assert max(len(line) for line in lines) <= 40
