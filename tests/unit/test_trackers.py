"""Trackers: each gets the numbers, the configuration and the summary; one that fails ends no run."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_cli.config.schema import Config, RunSection
from relax_cli.errors import EnvironmentFault
from relax_cli.plugin.records import load_reference
from relax_cli.plugin.trackers import BUILTIN_TRACKERS, TrackedRun, Tracker, tracker_names
from relax_cli.preflight.rules import RuleContext, run_rules
from relax_cli.preflight.rules.folders import tracker_missing
from relax_cli.tracking import trackers as trackers_module
from relax_cli.tracking.trackers import Trackers, numbers

CONFIG = {"optimizer": {"lr": 1e-6}, "rollout": {"rollout_stop": ["é"]}}
STEP = {"step": 12, "time": 1.5, "value_loss": 0.12, "phase_seconds": {"critic": 0.3}, "warnings": [{"id": "kl-large"}]}
EVALUATION = {"step": 12, "time": 2.5, "eval/heldout/reward/mean": 0.5, "eval/heldout/pass@1": 0.25}
SUMMARY = {"ok": True, "reward/mean": 0.9}


def written(name: str, folder: Path, *records: Mapping[str, Any], done: int = 0) -> TrackedRun:
    """A run in a folder that one built-in tracker has seen."""
    run = TrackedRun(folder, CONFIG, done)
    tracker = Trackers([BUILTIN_TRACKERS[name]], run, pytest.fail)
    for record in records:
        tracker.write(record)
    tracker.close(SUMMARY)
    return run


def needs(*packages: str) -> Any:
    """The packages of a tracker, or a skip that says how to install them."""
    first, *_ = [pytest.importorskip(name, reason=f"pip install 'relax-cli[{packages[0]}]'") for name in packages]
    return first


def test_numbers_are_what_a_tracker_draws() -> None:
    assert dict(numbers(STEP)) == {"value_loss": 0.12, "phase_seconds/critic": 0.3}


def test_tensorboard_gets_the_numbers_of_a_record(tmp_path: Path) -> None:
    needs("tensorboard")
    events_module = import_module("tensorboard.backend.event_processing.event_accumulator")
    written("tensorboard", tmp_path, STEP, EVALUATION)
    events = events_module.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert events.Scalars("phase_seconds/critic")[0].value == pytest.approx(0.3)
    assert events.Scalars("value_loss")[0].step == 12
    assert events.Scalars("eval/heldout/reward/mean")[0].value == 0.5
    texts = [events.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0] for name in ("config", "summary")]
    assert b"optimizer.lr: 1e-06" in texts[0]
    assert b"ok: True" in texts[1]


def test_wandb_offline_gets_all_and_resumes_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    written("wandb", tmp_path, STEP, EVALUATION)
    wandb.teardown()  # A resumed run is a process of its own.
    kept = (tmp_path / "logs" / "wandb.txt").read_text()
    written("wandb", tmp_path, STEP | {"step": 12, "value_loss": 0.13}, done=11)
    wandb.teardown()
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert [file.name for file in files] == [f"run-{kept}.wandb"] * 2
    first, resumed = (file.read_bytes() for file in files)
    sent = (b"value_loss", b"0.12", b"phase_seconds/critic", b"eval/heldout/reward/mean", b"optimizer", b"ok")
    assert [text for text in sent if text not in first] == []
    assert b"0.13" in resumed


def test_wandb_without_a_login_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SimpleNamespace(settings=SimpleNamespace(mode="online", project=None))
    library = SimpleNamespace(Settings=dict, setup=lambda _: settings, login=lambda prompt: prompt)
    monkeypatch.setitem(sys.modules, "wandb", library)
    with pytest.raises(EnvironmentFault) as caught:
        written("wandb", tmp_path)
    assert "WANDB_MODE=offline" in caught.value.problems[0].got


@pytest.mark.parametrize("store", ["file://{}/mlruns", pytest.param("sqlite:///{}/mlflow.db", marks=pytest.mark.slow)])
def test_mlflow_gets_all_and_resumes_its_run(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = needs("mlflow", "sqlalchemy", "alembic")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.format(tmp_path))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(store.format(tmp_path))
    folder = tmp_path / "ppo-1"
    written("mlflow", folder, STEP, EVALUATION)
    written("mlflow", folder, STEP | {"step": 13}, done=12)
    client = mlflow.MlflowClient()
    run = client.get_run((folder / "logs" / "mlflow.txt").read_text())
    assert run.data.metrics["value_loss"] == 0.12
    assert run.data.metrics["eval/heldout/reward/mean"] == 0.5
    assert run.data.metrics["eval/heldout/pass_1"] == 0.25
    assert [m.step for m in client.get_metric_history(run.info.run_id, "value_loss")] == [12, 13]
    assert run.data.tags["config.optimizer.lr"] == "1e-06"
    assert run.data.tags["summary.ok"] == "True"
    assert (run.info.status, run.info.run_name) == ("FINISHED", "ppo-1")


def test_trackio_gets_all_and_resumes_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Before trackio is imported: it reads them once.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    needs("trackio")
    written("trackio", tmp_path / "ppo-1", STEP, EVALUATION)
    written("trackio", tmp_path / "ppo-1", STEP | {"step": 13}, done=12)
    with sqlite3.connect(tmp_path / "trackio" / "relax.db") as store:
        rows = store.execute("select run_name, step, metrics from metrics order by id").fetchall()
        (config,) = store.execute("select config from configs").fetchone()
    assert {name for name, _, _ in rows} == {"ppo-1"}
    found = [(step, json.loads(metrics)) for _, step, metrics in rows]
    assert (12, {"value_loss": 0.12, "phase_seconds/critic": 0.3}) in found
    assert (12, {"eval/heldout/reward/mean": 0.5, "eval/heldout/pass@1": 0.25}) in found
    assert (13, {"value_loss": 0.12, "phase_seconds/critic": 0.3}) in found
    assert {"summary/ok": 1.0, "summary/reward/mean": 0.9} in [metrics for _, metrics in found]
    assert json.loads(config)["optimizer.lr"] == 1e-6


class Fragile:
    """A tracker that takes one record."""

    def __init__(self, run: TrackedRun) -> None:
        if run.done:
            raise ConnectionError("no route")
        self.seen: list[Mapping[str, Any]] = []

    def write(self, record: Mapping[str, Any]) -> None:
        if self.seen:
            sys.exit("full")
        self.seen.append(record)

    def close(self, summary: Mapping[str, Any]) -> None:
        raise AssertionError("it was left out")


FRAGILE = Tracker("fragile", "breaks", f"{__name__}:Fragile")


def test_a_tracker_that_fails_is_left_out_with_one_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    trackers = Trackers([FRAGILE], TrackedRun(tmp_path, CONFIG), warnings.append)
    for step in range(1, 4):
        trackers.write({"step": step})
    trackers.close({})
    assert len(warnings) == 1
    assert "the tracker fragile failed, the run continues without it: SystemExit: full" in warnings[0]


def test_a_tracker_that_cannot_be_opened_stops_the_launch(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        Trackers([FRAGILE], TrackedRun(tmp_path, CONFIG, done=3), pytest.fail)
    (problem,) = caught.value.problems
    assert (problem.id, problem.option) == ("tracker-failed", "--track")
    assert "no route" in problem.got


@pytest.mark.parametrize(
    ("track", "wrong", "fix"),
    [
        (("wandbb", "mlflow"), "wandbb", "--track wandb"),
        (("wandb,mlflow",), "wandb,mlflow", "--track wandb --track mlflow"),
        (("a b",), "a b", "install its plugin, or drop --track 'a b'"),
    ],
)
def test_tracker_unknown(track: tuple[str, ...], wrong: str, fix: str) -> None:
    context = RuleContext(Config(run=RunSection(track=track)))
    (problem,) = (p for p in run_rules(context, skip_files=True) if p.id == "tracker-unknown")
    assert (problem.got, problem.fix) == (wrong, fix)


@pytest.mark.parametrize("asked", [{"tensorboard": True}, {"track": ("tensorboard",)}, {}])
def test_tracker_missing(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> list[tuple[str, str]]:
        return [(p.id, p.fix) for p in tracker_missing.problems(RuleContext(Config(run=RunSection(**asked))))]

    spec_of = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else spec_of(name))
    assert found() == ([("tracker-missing", "pip install 'relax-cli[tensorboard]'")] if asked else [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert found() == []


def test_the_old_option_is_one_of_the_trackers() -> None:
    assert tracker_names(RunSection(track=("wandb", "tensorboard", "wandb"), tensorboard=True)) == [
        "wandb", "tensorboard"
    ]  # fmt: skip


def test_built_in_trackers_lead_to_functions() -> None:
    assert {load_reference(t.opens, t.name) for t in BUILTIN_TRACKERS.values()} == {
        trackers_module.TensorBoard, trackers_module.Wandb, trackers_module.MLflow, trackers_module.Trackio
    }  # fmt: skip
