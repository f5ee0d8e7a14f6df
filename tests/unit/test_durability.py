"""What a checkpoint, its tracker, metrics and samples promise about a power cut: flush, rename, flush the folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_cli.checkpoint import folders, layout, store
from relax_cli.checkpoint.layout import FileEntry
from relax_cli.roles.sample_files import SampleWriter
from relax_cli.tracking.run_files import MetricsWriter
from tests.support.lossy_disk import LossyDisk


class Model:
    """Writes two files, one of them hashed while it is written."""

    def prepare_save(self, common: dict[str, Any], *, copied: bool) -> Callable[[Path, Any], list[FileEntry]]:
        def write(folder: Path, group: Any) -> list[FileEntry]:
            (folder / "shard").write_text("weights")
            (folder / "common.pt").write_text(str(common))
            return [layout.describe_file(folder, Path("shard"))]

        return write

    def load(self, folder: Path) -> dict[str, Any]:
        raise NotImplementedError

    def random_state(self) -> dict[str, Any]:
        return {}

    def restore_random_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def parallel_layout(self) -> dict[str, int]:
        return {"tensor_parallel": 1}


def save(save_dir: Path) -> None:
    store.prepare(Model(), save_dir, 1, "actor", {}, copied=False)()
    folders.commit(save_dir, 1)
    folders.publish(save_dir, 1)


def nothing(*args: object) -> None:
    """Stands for a call that somebody took out."""


def no_fsync_of(kind: Callable[[Path], bool]) -> Callable[[int], None]:
    real = os.fsync
    return lambda fd: None if kind(Path(os.readlink(f"/proc/self/fd/{fd}"))) else real(fd)


def test_a_checkpoint_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = LossyDisk(monkeypatch, layout.TRACKER_FILE)
    save(tmp_path / "new" / "saves")
    assert disk.faults() == []
    folder = tmp_path / "new/saves/iter_0000001"
    assert {folder / name for name in ("shard", "common.pt", layout.META_FILE)} <= disk.flushed
    # So do the names of folders that were made for it.
    assert {tmp_path, tmp_path / "new", tmp_path / "new/saves"} <= disk.flushed


MISSING: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "files of the checkpoint": lambda patch: patch.setattr(layout, "fsync_file", nothing),
    "folders": lambda patch: patch.setattr(layout, "fsync_folder", nothing),
    "relax.json": lambda patch: patch.setattr(os, "fsync", no_fsync_of(lambda p: p.name == ".relax.json.tmp")),
    "the tracker": lambda patch: patch.setattr(os, "fsync", no_fsync_of(lambda p: layout.TRACKER_FILE in p.name)),
    "the checkpoint's folder": lambda patch: patch.setattr(os, "fsync", no_fsync_of(lambda p: p.name[:5] == ".iter")),
    "the save folder": lambda patch: patch.setattr(os, "fsync", no_fsync_of(lambda p: p.name == "saves")),
}


@pytest.mark.parametrize("what", MISSING)
def test_a_missing_flush_is_noticed(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = LossyDisk(monkeypatch, layout.TRACKER_FILE)
    # Over the watched calls: what is taken out reaches neither them nor the disk.
    MISSING[what](monkeypatch)
    save(tmp_path / "saves")
    assert disk.faults() != []


def test_metrics_and_samples_survive_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = LossyDisk(monkeypatch, "")
    with MetricsWriter(tmp_path) as metrics:
        path = SampleWriter(tmp_path).write(1, [{"reward": 1.0}])
        metrics.write({"step": 1})
    assert disk.faults() == []
    assert {path.parent, path, tmp_path, tmp_path / "metrics.jsonl"} <= disk.flushed
