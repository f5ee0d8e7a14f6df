"""One run, one folder."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

from relax_cli.config.schema import CheckpointSection, Config, CriticSection, RunSection
from relax_cli.engine.run_folder import claimed, written_folders
from relax_cli.errors import ConfigError


def test_a_folder_is_claimed_once_and_free_again_afterwards(tmp_path: Path) -> None:
    folders = {tmp_path / "run": "--run-dir", tmp_path / "actor": "--save"}
    with claimed(folders), pytest.raises(ConfigError) as caught, claimed({tmp_path / "actor": "--save"}):
        raise AssertionError("two runs write one folder")
    (problem,) = caught.value.problems
    assert (problem.id, problem.option, problem.where) == ("folder-locked", "--save", str(tmp_path / "actor"))
    with claimed(folders), claimed({tmp_path / "other": "--save"}):
        pass


def test_every_written_folder_is_locked_once_however_spelt(tmp_path: Path) -> None:
    config = Config(
        run=RunSection(run_dir=str(tmp_path / "a" / ".." / "run")),
        checkpoint=CheckpointSection(save=str(tmp_path / "run")),
        critic=CriticSection(critic_save=str(tmp_path / "critic")),
    )
    folders = written_folders(config)
    assert set(folders) == {tmp_path / "run", tmp_path / "critic"}
    with claimed(folders):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught, claimed({tmp_path / "file" / "run": "--run-dir"}):
        raise AssertionError("unreachable")
    assert caught.value.problems[0].id == "folder-unwritable"


def test_a_file_system_without_locks_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with claimed({tmp_path / "run": "--run-dir"}):
        assert (tmp_path / "run").is_dir()
