"""Small files of a checkpoint that somebody else may have written: refused, never followed, never waited for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_cli.checkpoint import layout
from relax_cli.errors import ResumeError
from tests.support.checkpoints import describe_files


def checkpoint(folder: Path, **changes: Any) -> Path:
    """A complete checkpoint whose `relax.json` has the given fields instead of its own."""
    folder.mkdir()
    (folder / "shard").write_text("content")
    layout.write_meta(folder, layout.CheckpointMeta("actor", 1, 1, {}, "", {}, {}, describe_files(folder)))
    path = folder / layout.META_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def entry(path: object, size: object = 7, sha256: object = "0" * 64) -> list[dict[str, Any]]:
    return [{"path": path, "size": size, "sha256": sha256}]


def test_an_untouched_one_is_complete(tmp_path: Path) -> None:
    assert layout.damages(checkpoint(tmp_path / "good"), deep=True) == []


@pytest.mark.parametrize(
    "path",
    ["../outside", "a/../../outside", "/etc/passwd", "", "..", "a\0b", "..\\outside", "x" * 5000, 7, None, ["a"]],
)
def test_a_file_outside_the_folder_is_refused(tmp_path: Path, path: object) -> None:
    (tmp_path / "outside").write_text("content")
    with pytest.raises(ResumeError, match="cannot be used"):
        layout.read_meta(checkpoint(tmp_path / "c", files=entry(path)))


def test_a_path_that_only_looks_like_leading_outside_is_none(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c")
    (folder / "..shard").write_text("content")
    (folder / "sub").mkdir()
    (folder / "sub" / "a..b").write_text("content")
    files = [vars(found) for found in describe_files(folder)]
    path = folder / layout.META_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": files}))
    assert layout.damages(folder, deep=True) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"format_version": 1},
        {"format_version": layout.FORMAT_VERSION + 1},
        {"format_version": "2"},
        {"format_version": True},
        {"iteration": "1"},
        {"iteration": True},
        {"iteration": None},
        {"role": ["actor"]},
        {"extra": []},
        {"parallel": "two"},
        {"files": {}},
        {"files": ["shard"]},
        {"files": entry("shard", size=True)},
        {"files": entry("shard", size="7")},
        {"files": entry("shard", sha256=None)},
        {"files": [{"path": "shard"}]},
        {"random_state": [7]},
        {"surprise": 1},
    ],
)
def test_fields_of_another_type_or_format_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ResumeError, match="cannot be used"):
        layout.read_meta(checkpoint(tmp_path / "c", **changes))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"format_version": ' + "9" * 100_000 + "}",
        "\ufeff{}",
        "null",
        "7",
        '"text"',
        "{" + " " * 1000,
    ],
    ids=["lists", "objects", "number", "mark", "null", "seven", "text", "open"],
)
def test_garbage_is_refused_however_deep_or_long(tmp_path: Path, text: str) -> None:
    (tmp_path / layout.META_FILE).write_text(text)
    with pytest.raises(ResumeError, match="cannot be used"):
        layout.read_meta(tmp_path)
    assert not layout.is_complete(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / layout.META_FILE).write_bytes(b"\x80\x02}q\x00." + bytes(range(256)))
    with pytest.raises(ResumeError, match="cannot be used"):
        layout.read_meta(tmp_path)


def test_a_file_of_any_size_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MOST_META_BYTES", 1000)
    (tmp_path / layout.META_FILE).write_text("{}" + " " * 999)
    with pytest.raises(ResumeError, match="more than the limit of 1,000"):
        layout.read_meta(tmp_path)
    with (tmp_path / layout.TRACKER_FILE).open("wb") as tracker:
        tracker.truncate(1 << 40)  # takes no room on the disk
    assert "more than the limit" in (layout.read_tracker(tmp_path).problem or "")


def as_pipe(path: Path) -> None:
    os.mkfifo(path)


def as_folder(path: Path) -> None:
    path.mkdir()


def as_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [as_pipe, as_folder, as_device])
def test_what_is_no_file_is_neither_waited_for_nor_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / layout.META_FILE)
    make(tmp_path / layout.TRACKER_FILE)
    with pytest.raises(ResumeError, match="cannot be used"):
        layout.read_meta(tmp_path)
    assert layout.read_tracker(tmp_path).problem is not None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [as_pipe, as_device])
def test_a_shard_that_is_no_file_is_damage(tmp_path: Path, make: Callable[[Path], None]) -> None:
    folder = checkpoint(tmp_path / "c")
    (folder / "shard").unlink()
    make(folder / "shard")
    assert layout.damages(folder, deep=True)[0].startswith("shard is ")


def test_links_may_not_lead_outside_and_are_not_followed_to_hash(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c")
    outside = tmp_path / "outside"
    (folder / "shard").rename(outside)
    (folder / "shard").symlink_to(outside)
    assert layout.damages(folder, deep=True) == ["shard is a link that leads out of the checkpoint"]
    assert not layout.is_complete(folder)


def test_a_linked_folder_may_not_lead_outside(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c", files=entry("sub/file"))
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("content")
    (folder / "sub").symlink_to(tmp_path / "outside")
    assert "sub is a link that leads out of the checkpoint" in layout.damages(folder)


def test_links_inside_and_a_linked_checkpoint_are_fine(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c")
    (folder / "again").symlink_to("shard")
    (tmp_path / "link").symlink_to(folder)
    assert layout.damages(tmp_path / "link", deep=True) == []
