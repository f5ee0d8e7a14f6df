"""When a run begins again by itself, and from where."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from relax_cli.checkpoint import layout
from relax_cli.config.layers import Layers
from relax_cli.engine import run as engine_run
from relax_cli.errors import Problem, ProcessLost, RelaxError, RunError
from relax_cli.plugin.manager import load_plugins
from relax_cli.preflight.check_run import CheckedRun, check_run

LOST = Problem("worker-failed", "rank 0 of actor is gone: killed by SIGKILL", fix="resume the run")


def checked(*words: str) -> CheckedRun:
    return check_run(load_plugins(), Layers(["tiny-ppo-cpu"], {}, list(words)))


class Run:
    """`run.train` that fails with each of the given errors in turn, and then ends well."""

    def __init__(self, *errors: RelaxError, saving: Path | None = None) -> None:
        self.errors = list(errors)
        self.saving = saving
        self.started: list[CheckedRun] = []
        self.patience: list[float] = []

    def __call__(self, plugins: Any, run: CheckedRun, console: Console, patience: float) -> Any:
        self.started.append(run)
        self.patience.append(patience)
        if self.errors:
            if self.saving is not None:
                layout.write_tracker(self.saving, 3)
            raise self.errors.pop(0)
        return "finished"


def restarted(run: Run, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Any, str]:
    monkeypatch.setattr(engine_run, "train", run)
    screen = io.StringIO()
    result = engine_run.train_with_restarts(load_plugins(), checked(*words), Console(file=screen, width=200))
    return result, screen.getvalue()


def test_a_lost_process_restarts_from_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(ProcessLost(LOST), ProcessLost(LOST), saving=tmp_path)
    words = [f"checkpoint.save={tmp_path}", f"critic.critic_save={tmp_path}-critic", "run.max_restarts=2"]
    result, screen = restarted(run, monkeypatch, *words)
    assert result == "finished"
    assert [each.config.checkpoint.load for each in run.started] == [None, str(tmp_path), str(tmp_path)]
    assert [each.config.critic.critic_load for each in run.started] == [None, *2 * [f"{tmp_path}-critic"]]
    assert run.patience == [0, engine_run.NODE_SECONDS, engine_run.NODE_SECONDS], "a lost node may come back"
    assert len({each.config.run.run_dir for each in run.started}) == 1
    assert len({each.config_hash for each in run.started}) == 1
    assert f"restart 2 of 2, from the newest pair in {tmp_path}" in screen


def test_without_anything_saved_it_restarts_from_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(ProcessLost(LOST))
    _, screen = restarted(run, monkeypatch, f"checkpoint.save={tmp_path}", "run.max_restarts=1")
    assert [each.config.checkpoint.load for each in run.started] == [None, None]
    assert "restart 1 of 1, from the start" in screen


@pytest.mark.parametrize(
    ("error", "allowed", "starts"),
    [(ProcessLost, 0, 1), (ProcessLost, 1, 2), (RunError, 5, 1)],
    ids=["not requested", "used up", "a failure that would come again"],
)
def test_what_ends_the_run_all_the_same(
    error: type[RelaxError], allowed: int, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(*(error(LOST) for _ in range(3)))
    with pytest.raises(error):
        restarted(run, monkeypatch, f"run.max_restarts={allowed}")
    assert len(run.started) == starts
