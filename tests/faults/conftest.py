"""One warm process and one uninterrupted run for all fault tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fault_runs import Folders, Zygote, arguments


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Starts runs in about a second."""
    process = Zygote()
    yield process
    process.close()


@pytest.fixture(scope="session")
def straight(zygote: Zygote, task: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The run that nothing disturbed."""
    folders = Folders(tmp_path_factory.mktemp("straight"))
    (folders.root / "started").touch()
    ended = zygote.run(folders.root, arguments(task, folders))
    assert ended.code == 0, ended.err
    return folders
