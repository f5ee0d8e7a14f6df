"""Helper processes: one that cannot be started, and what ended one, are named."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from relax_cli.errors import EnvironmentFault
from relax_cli.plugin import apart, user_code


@pytest.mark.parametrize("broken", ["interpreter", "temporary folder"])
def test_a_helper_that_cannot_start_is_a_named_problem(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken == "interpreter":
        monkeypatch.setattr(sys, "executable", str(tmp_path))
    else:
        monkeypatch.setattr(apart.tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(EnvironmentFault) as caught:
        apart.run_apart("json:loads", "{}", what="json")
    (problem,) = caught.value.problems
    assert problem.id == "helper-process-failed"
    assert str(tmp_path) in problem.where


def test_a_helper_that_takes_long_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(user_code, "SILENT", 0.0)
    assert apart.run_apart("time:sleep", 0.5, what="the import of a.py") == []
    assert capsys.readouterr().err == "waiting for the import of a.py, at most 120 s\n"


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN, "SIGRTMIN"), (signal.SIGRTMIN + 5, "signal 39")]
)
def test_every_signal_has_a_name(number: int, name: str) -> None:
    assert apart.signal_name(number) == name
