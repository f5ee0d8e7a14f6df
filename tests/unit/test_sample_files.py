"""Samples of a step: written whole and compact, chosen, read back to the bit; damage is named."""

from __future__ import annotations

import json
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_cli.config.layers import Layers, load_config
from relax_cli.config.schema import Config
from relax_cli.errors import ConfigError, RunError
from relax_cli.roles import sample_files
from relax_cli.roles.sample_files import SampleWriter, read_samples


def sample(row: int, values: list[float], **texts: Any) -> dict[str, Any]:
    return {"row": row, "prompt": "1+1=", **texts, "values": np.array(values, dtype=np.float32)}


SAMPLES = [
    sample(0, [0.1, float("nan"), -0.0], response="ü\n\u2028\x85\x1b[1m\ud800", reward=float("inf")),
    sample(1, [], response=""),
    sample(2, [1e-45, 3e38], response="x", parts={"a": 1.0}),
]


def test_numbers_come_back_to_the_bit_and_texts_as_they_were(tmp_path: Path) -> None:
    path = SampleWriter(tmp_path).write(3, SAMPLES)
    assert path == tmp_path / "rollouts/step_000003.zip"
    found = read_samples([path])
    for before, after in zip(SAMPLES, found, strict=True):
        assert before.pop("values").tobytes() == after.pop("values").tobytes()
    assert found == [{**SAMPLES[0], "reward": None}, *SAMPLES[1:]]
    assert read_samples([path], numbers=False) == found
    with zipfile.ZipFile(path) as archive:
        assert np.load(archive.open("values.npy")).shape == (5,)


def test_parts_of_several_workers_are_one_step(tmp_path: Path) -> None:
    for part, row in ((1, 7), (0, 3), (10, 9)):
        SampleWriter(tmp_path, part=part).write(2, [sample(row, [1.0])])
    files = sample_files.sample_files(tmp_path)
    assert [row["row"] for row in read_samples(files[2])] == [3, 7, 9]


def test_folders_of_former_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    old = {"row": 0, "response": "a", "response_token_ids": [1, 2], "log_probs": [None, -0.1], "tags": [1]}
    (tmp_path / "rollouts/step_000000.jsonl").write_text(json.dumps(old) + "\n")
    ((number, paths),) = sample_files.sample_files(tmp_path).items()
    (found,) = read_samples(paths)
    assert number == 0
    assert found["log_probs"].dtype == np.float32
    assert np.isnan(found["log_probs"][0])
    assert found["response_token_ids"].tolist() == [1, 2]
    assert found["tags"] == [1]
    assert "log_probs" not in read_samples(paths, numbers=False)[0]


def test_the_caller_continues_while_a_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, write = threading.Event(), sample_files._write_zip
    monkeypatch.setattr(sample_files, "_write_zip", lambda *args: (go.wait(10), write(*args)))
    writer = SampleWriter(tmp_path)
    writer.start(1, SAMPLES)
    assert not sample_files.sample_files(tmp_path), "a file that is not complete has no name"
    go.set()
    writer.wait()
    assert list(sample_files.sample_files(tmp_path)) == [1]


def test_a_file_that_cannot_be_written_is_told_by_the_next_call(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path)
    (tmp_path / "rollouts").rename(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="removed or renamed"):
        writer.start(1, SAMPLES)
    (tmp_path / "elsewhere").rename(tmp_path / "rollouts")
    writer.start(2, SAMPLES)
    (tmp_path / "rollouts/step_000003.zip").mkdir()
    writer.wait()
    writer.start(3, SAMPLES)
    with pytest.raises(RunError, match="Is a directory"):
        writer.wait()
    writer.wait()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[60] ^= 0xFF
    path.write_bytes(content)


def without_lengths(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("samples.jsonl", "{}\n")
        archive.writestr("values.npy", b"\x93NUMPY")


@pytest.mark.parametrize("damage", [cut, flip, without_lengths, lambda path: path.write_bytes(b"")])
def test_a_damaged_file_is_named(damage: Callable[[Path], None], tmp_path: Path) -> None:
    path = SampleWriter(tmp_path).write(1, SAMPLES)
    damage(path)
    with pytest.raises(ConfigError) as caught:
        read_samples([path])
    (problem,) = caught.value.problems
    assert (problem.id, problem.where) == ("samples-unreadable", str(path))


@pytest.mark.parametrize(
    ("given", "most"), [("all", float("inf")), ("none", 0), ("16", 16), (16, 16), (0, None), (-1, None), (True, None)]
)
def test_how_many_samples_are_written_is_chosen(given: Any, most: float | None) -> None:
    loaded = load_config(Layers(overrides=[f"run.dump_rollouts={json.dumps(given)}"]), Config)
    if most is None:
        (problem,) = loaded.problems
        assert problem.fix == "give run.dump_rollouts a value that is all, none or a number of samples"
    else:
        assert loaded.config.run.most_dumped == most
