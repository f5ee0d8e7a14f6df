"""One warm process and one uninterrupted run for all fault tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_cli.quickstart.task import prepare
from tests.support.fault_runs import Folders, Zygote, arguments


@pytest.fixture(scope="session")
def fault_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model, data and recipe."""
    folder = tmp_path_factory.mktemp("faults") / "task"
    prepare(folder, seed=1, steps=3)
    return folder


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Starts runs in about a second."""
    process = Zygote()
    yield process
    process.close()


@pytest.fixture(scope="session")
def straight(zygote: Zygote, fault_task: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The run that nothing disturbed."""
    folders = Folders(tmp_path_factory.mktemp("straight"))
    (folders.root / "started").touch()
    ended = zygote.run(folders.root, arguments(fault_task, folders))
    assert ended.code == 0, ended.err
    return folders
