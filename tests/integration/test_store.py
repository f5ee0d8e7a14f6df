"""Checkpoints: what is on disk at every step, and that a resumed run is the uninterrupted one, bit by bit."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from relax_cli.backends.device import Parking
from relax_cli.checkpoint import folders, layout, safe_load, store
from relax_cli.checkpoint.hashing import THREAD, HashingFileSystem
from relax_cli.checkpoint.layout import Tracker
from relax_cli.errors import ResumeError, RunError
from tests.support.tiny_models import on_ranks, save_tiny_model
from tests.support.training_runs import META, ROWS, Run, build, loss_fn, micro_batches, train


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(folder, "qwen3", tied=True)
    return folder


def trained(kind: str, model: Path, steps: int = 2):  # type: ignore[no-untyped-def]
    built = build(Run(kind, model))  # type: ignore[arg-type]
    for _ in range(steps):
        built.train_step(micro_batches(3, ROWS), loss_fn)
    return built


def everything(model) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    steps = [state["step"] for state in model.optimizer.adam.state.values()]
    return [tensor.detach().clone() for tensor in [*model.model.parameters(), *model.optimizer.tensors(), *steps]]


def assert_bitwise(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_a_resumed_run_continues_bit_by_bit(kind: str, qwen3: Path, tmp_path: Path) -> None:
    straight = trained(kind, qwen3)
    store.prepare(straight, tmp_path, 2, "actor", META, copied=False)()
    folders.commit(tmp_path, 2)
    random_at_save = torch.rand(3)
    resumed = build(Run(kind, qwen3))  # type: ignore[arg-type]
    torch.manual_seed(999)
    restored = store.load(resumed, layout.iteration_folder(tmp_path, 2))
    known = {"weight_version": restored.weight_version, "seeds": restored.seeds, "config_hash": restored.config_hash}
    assert (restored.role, restored.iteration, known | restored.extra) == ("actor", 2, META)
    assert torch.equal(torch.rand(3), random_at_save)
    assert_bitwise(everything(straight), everything(resumed))
    for _ in range(2):
        one, other = (model.train_step(micro_batches(3, ROWS), loss_fn) for model in (straight, resumed))
        assert one == other
    assert_bitwise(everything(straight), everything(resumed))


def test_a_model_that_has_not_trained_yet_is_saved_and_resumed(qwen3: Path, tmp_path: Path) -> None:
    waiting = trained("policy", qwen3, steps=0)
    store.prepare(waiting, tmp_path, 1, "actor", META, copied=False)()
    folders.commit(tmp_path, 1)
    resumed = build(Run("policy", qwen3))
    store.load(resumed, layout.iteration_folder(tmp_path, 1))
    one, other = (model.train_step(micro_batches(3, ROWS), loss_fn) for model in (waiting, resumed))
    assert one == other
    assert_bitwise(everything(waiting), everything(resumed))


def test_options_of_the_new_command_line_win_over_the_checkpoint(qwen3: Path, tmp_path: Path) -> None:
    store.prepare(trained("policy", qwen3), tmp_path, 2, "actor", META, copied=False)()
    folders.commit(tmp_path, 2)
    resumed = build(Run("policy", qwen3, lr=5e-4))
    store.load(resumed, layout.iteration_folder(tmp_path, 2))
    assert resumed.train_step(micro_batches(3, ROWS), loss_fn).lr == 5e-4


@pytest.mark.parametrize(("kind", "saved_tp", "loaded_tp"), [("policy", 1, 2), ("value", 2, 1)])
def test_a_checkpoint_loads_at_another_tensor_parallel_size(
    kind: str, saved_tp: int, loaded_tp: int, qwen3: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    first = Run(kind, qwen3, tensor_parallel=saved_tp, save=folder, save_after=2)  # type: ignore[arg-type]
    straight = (on_ranks(2, train, first) if saved_tp == 2 else [train(0, 1, 0, first)])[0]
    second = Run(kind, qwen3, tensor_parallel=loaded_tp, steps=1, load=folder)  # type: ignore[arg-type]
    resumed = (on_ranks(2, train, second) if loaded_tp == 2 else [train(0, 1, 0, second)])[0]
    assert resumed["common"] == {"note": "kept"}
    np.testing.assert_allclose(resumed["losses"], straight["losses"][2:], atol=1e-5)
    np.testing.assert_allclose(resumed["grad_norms"], straight["grad_norms"][2:], rtol=1e-4)
    np.testing.assert_allclose(resumed["grid"], straight["grid"], atol=2e-5)


@pytest.mark.parametrize("copied", [False, True])
def test_two_ranks_write_one_checkpoint(qwen3: Path, tmp_path: Path, copied: bool) -> None:
    at_the_save = on_ranks(2, write_on_rank, Run("policy", qwen3), tmp_path, copied)[0]
    folder = layout.iteration_folder(tmp_path, 3)
    assert layout.is_complete(folder)
    assert layout.read_meta(folder).parallel == {"tensor_parallel": 1, "data_parallel": 2}
    resumed = build(Run("policy", qwen3))
    store.load(resumed, folder)
    assert_bitwise(everything(resumed), [torch.from_numpy(array) for array in at_the_save])


def write_on_rank(rank: int, ranks: int, port: int, run: Run, save_dir: Path, copied: bool = False) -> list[np.ndarray]:  # type: ignore[type-arg]
    """What is saved; a copy is written while the ranks train and talk to each other."""
    model = build(run, rank, ranks, port)
    batch = micro_batches(3, ROWS[rank::ranks])
    model.train_step(batch, loss_fn)
    before = [tensor.numpy() for tensor in everything(model)]
    group = store.own_group() if copied else None
    write = store.prepare(model, save_dir, 3, "actor", META, copied=copied, group=group)
    with ThreadPoolExecutor(1) as thread:
        if copied:
            model.train_step(batch, loss_fn)
        written = thread.submit(write)
        for _ in range(4 * copied):
            model.train_step(batch, loss_fn)
        written.result()
    if rank == 0:
        folders.commit(save_dir, 3)
    return before


def test_final_names_come_at_commit_and_the_tracker_moves_last(qwen3: Path, tmp_path: Path) -> None:
    model = trained("policy", qwen3, steps=0)
    store.prepare(model, tmp_path, 1, "actor", META, copied=False)()
    assert layout.list_iterations(tmp_path) == []
    assert layout.is_complete(layout.temporary_folder(tmp_path, 1))
    folders.commit(tmp_path, 1)
    assert layout.list_iterations(tmp_path) == [1]
    assert layout.read_tracker(tmp_path) == Tracker(None)
    folders.publish(tmp_path, 1)
    assert layout.read_tracker(tmp_path) == Tracker(1)
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001", layout.TRACKER_FILE}


def test_old_checkpoints_go_after_the_new_one_counts(qwen3: Path, tmp_path: Path) -> None:
    model = trained("policy", qwen3, steps=0)
    for iteration in (1, 2, 3):
        store.prepare(model, tmp_path, iteration, "actor", META, copied=False)()
        folders.commit(tmp_path, iteration)
        folders.publish(tmp_path, iteration)
        folders.rotate(tmp_path, iteration, keep=2)
    assert layout.list_iterations(tmp_path) == [2, 3]
    assert layout.read_tracker(tmp_path) == Tracker(3)
    folders.rotate(tmp_path, 3, keep=1, protected=[2])
    assert layout.list_iterations(tmp_path) == [2, 3]
    folders.rotate(tmp_path, 3, keep=1, protected=[1])
    assert layout.list_iterations(tmp_path) == [3]


def test_a_checkpoint_of_the_same_iteration_is_replaced(qwen3: Path, tmp_path: Path) -> None:
    model = trained("policy", qwen3, steps=0)
    for version in (1, 2):
        store.prepare(model, tmp_path, 5, "actor", META | {"weight_version": version}, copied=False)()
        folders.commit(tmp_path, 5)
    assert layout.read_meta(layout.iteration_folder(tmp_path, 5)).weight_version == 2


def test_damage_is_found(qwen3: Path, tmp_path: Path) -> None:
    store.prepare(trained("policy", qwen3, steps=0), tmp_path, 1, "actor", META, copied=False)()
    folder = layout.temporary_folder(tmp_path, 1)
    (shard,) = folder.glob("*.distcp")
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert layout.damages(folder) == []
    assert layout.damages(folder, deep=True) == [f"{shard.name} has changed since it was written"]
    with pytest.raises(ResumeError, match="has changed since it was written") as caught:
        store.load(build(Run("policy", qwen3)), folder)
    assert caught.value.problems[0].id == "resume-unreadable"
    shard.write_bytes(content[:-1])
    assert not layout.is_complete(folder)
    shard.unlink()
    assert layout.damages(folder) == [f"{shard.name} is missing"]


def test_a_checkpoint_of_another_model_is_refused(qwen3: Path, tmp_path: Path) -> None:
    store.prepare(trained("policy", qwen3, steps=0), tmp_path, 1, "actor", META, copied=False)()
    save_tiny_model(tmp_path / "deeper", "qwen3", tied=True, layers=3)
    with pytest.raises(ResumeError, match="does not load into this model") as caught:
        store.load(build(Run("policy", tmp_path / "deeper")), layout.temporary_folder(tmp_path, 1))
    assert caught.value.problems[0].id == "checkpoint-unloadable"
    assert caught.value.problems[0].where == str(layout.temporary_folder(tmp_path, 1))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format_version": 1}', '{"format_version": 99, "files": []}'])
def test_an_unusable_relax_json_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / layout.META_FILE).write_text(content)
    with pytest.raises(ResumeError, match="cannot be used"):
        layout.read_meta(tmp_path)
    assert not layout.is_complete(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"), [("40\n", Tracker(40)), ("release", Tracker("release")), (None, Tracker(None))]
)
def test_the_tracker_is_understood(tmp_path: Path, content: str | None, expected: Tracker) -> None:
    if content is not None:
        (tmp_path / layout.TRACKER_FILE).write_text(content)
    assert layout.read_tracker(tmp_path) == expected


@pytest.mark.parametrize("content", ["", "-1", "4.5", "forty", "\x00" * 8])
def test_a_tracker_with_garbage_names_the_problem(tmp_path: Path, content: str) -> None:
    (tmp_path / layout.TRACKER_FILE).write_text(content)
    tracker = layout.read_tracker(tmp_path)
    assert tracker.iteration is None
    assert layout.TRACKER_FILE in (tracker.problem or "")


def test_a_disk_that_refuses_leaves_the_old_checkpoint(qwen3: Path, tmp_path: Path) -> None:
    model = trained("policy", qwen3, steps=0)
    store.prepare(model, tmp_path, 1, "actor", META, copied=False)()
    folders.commit(tmp_path, 1)
    folders.publish(tmp_path, 1)
    layout.temporary_folder(tmp_path, 2).write_text("a file where the folder should be")
    with pytest.raises(RunError) as caught:
        store.prepare(model, tmp_path, 2, "actor", META, copied=False)()
    assert caught.value.problems[0].id == "storage-failed"
    assert layout.read_tracker(tmp_path) == Tracker(1)
    assert layout.is_complete(layout.iteration_folder(tmp_path, 1))


def test_saving_starts_no_processes(qwen3: Path, tmp_path: Path) -> None:
    model = trained("policy", qwen3, steps=0)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = children.read_text()
    store.prepare(model, tmp_path, 1, "actor", META, copied=False)()
    assert children.read_text() == before


def test_layout_needs_no_torch() -> None:
    code = "import sys, relax_cli.checkpoint.layout; print([m for m in ('torch', 'megatron') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_relax_json_is_plain_json(qwen3: Path, tmp_path: Path) -> None:
    store.prepare(trained("value", qwen3, steps=0), tmp_path, 1, "critic", META, copied=False)()
    raw = json.loads((layout.temporary_folder(tmp_path, 1) / layout.META_FILE).read_text())
    assert raw["role"] == "critic"
    assert raw["extra"] == {"data_position": {"rollouts": 17}}
    assert {entry["path"] for entry in raw["files"]} >= {"common.pt", "metadata.json", ".metadata"}


def test_relax_json_has_every_random_state_and_shards_no_pickle(qwen3: Path, tmp_path: Path) -> None:
    on_ranks(2, write_on_rank, Run("policy", qwen3), tmp_path)
    folder = layout.iteration_folder(tmp_path, 3)
    states = layout.read_meta(folder).random_state
    assert [set(state) for state in states] == [{"python", "numpy", "torch"}] * 2
    entries = safe_load.read_metadata(folder).state_dict_metadata
    assert [name for name, entry in entries.items() if not isinstance(entry, TensorStorageMetadata)] == []
    assert layout.damages(folder, deep=True) == []


def test_every_generator_goes_on_where_it_was(qwen3: Path, tmp_path: Path) -> None:
    model = trained("policy", qwen3, steps=0)

    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(),
            np.random.standard_normal(),
            np.random.random(),
            *torch.rand(2).tolist(),
        ]

    draw()  # leaves the second half of a pair of normal numbers behind
    store.prepare(model, tmp_path, 1, "actor", META, copied=False)()
    folders.commit(tmp_path, 1)
    expected = draw()
    draw()
    store.load(model, layout.iteration_folder(tmp_path, 1))
    assert draw() == expected


def test_another_number_of_ranks_leaves_the_generators_alone(qwen3: Path, tmp_path: Path) -> None:
    on_ranks(2, write_on_rank, Run("policy", qwen3), tmp_path)
    resumed = build(Run("policy", qwen3))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    store.load(resumed, layout.iteration_folder(tmp_path, 3))
    assert torch.equal(torch.rand(3), expected)


def test_shards_are_hashed_while_they_are_written(qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_again = []
    sha256_of = layout.sha256_of
    monkeypatch.setattr(layout, "sha256_of", lambda path: read_again.append(path.name) or sha256_of(path))
    store.prepare(trained("policy", qwen3), tmp_path, 1, "actor", META, copied=False)()
    assert sorted(read_again) == ["common.pt", "metadata.json"]
    monkeypatch.undo()
    assert layout.damages(layout.temporary_folder(tmp_path, 1), deep=True) == []


def test_bytes_that_did_not_arrive_are_noticed(qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained("policy", qwen3, steps=0)
    entries = HashingFileSystem.entries

    def one_byte_more(files: HashingFileSystem) -> list[layout.FileEntry]:
        return [replace(entry, size=entry.size + 1) for entry in entries(files)]

    monkeypatch.setattr(HashingFileSystem, "entries", one_byte_more)
    with pytest.raises(RunError, match="bytes arrived of"):
        store.prepare(model, tmp_path, 1, "actor", META, copied=False)()
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_hashed_as_it_grows(tmp_path: Path) -> None:
    files = HashingFileSystem()
    parts = [os.urandom(size) for size in (0, 1, 5_000_000, 17)]
    with files.create_stream(tmp_path / ".one.tmp", "wb") as stream:
        for part in parts:
            stream.write(part)
            stream.flush()
        stream.write(b"the rest is not flushed by the writer")
    files.rename(tmp_path / ".one.tmp", tmp_path / "one")
    (entry,) = files.entries()
    assert entry == layout.describe_file(tmp_path, Path("one"))


def test_a_file_that_fails_has_no_hash_and_leaves_no_thread(tmp_path: Path) -> None:
    files = HashingFileSystem()
    with suppress(ZeroDivisionError), files.create_stream(tmp_path / "one", "wb") as stream:
        stream.write(b"some")
        raise ZeroDivisionError
    assert files.entries() == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD)] == []


def test_parked_memory_is_away_and_comes_back_bit_by_bit() -> None:
    base = torch.randn(5, 7)
    view, scratch = base[1:3], torch.ones(4)
    expected = base.clone()
    parking = Parking()
    parking.park([base, view], scratch=[scratch])
    assert base.untyped_storage().nbytes() == 0
    assert scratch.untyped_storage().nbytes() == 0
    parking.restore()
    assert torch.equal(base, expected)
    assert torch.equal(view, expected[1:3])
    assert not scratch.any()
    base[1, 0] = 9.0
    assert view[0, 0] == 9.0


def test_a_parked_model_trains_on_as_if_nothing_happened(qwen3: Path) -> None:
    parked, plain = trained("policy", qwen3), trained("policy", qwen3)
    parked.device = replace(parked.device, shared_memory=True)  # sleep for real
    parked.sleep()
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in parked.model.parameters())
    parked.wake()
    parked.device = plain.device
    one, other = (model.train_step(micro_batches(3, ROWS), loss_fn) for model in (parked, plain))
    assert one == other
    assert_bitwise(everything(parked), everything(plain))
