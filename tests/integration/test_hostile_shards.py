"""Checkpoints into which somebody planted code: loading refuses them, and the code has not run.

Each plant is a real exploit: the same file loaded by pickle writes the marker, which `test_the_plants_are_live` shows.
"""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.metadata import MetadataIndex

from relax_cli.backends.megatron import checkpointing, random_state
from relax_cli.checkpoint import folders, layout, safe_load, store
from relax_cli.errors import ResumeError
from tests.support.checkpoints import describe_files
from tests.support.tiny_models import save_tiny_model
from tests.support.training_runs import META, Run, build


class Exploit:
    """Touches the marker when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.marker,)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(folder, "qwen3", tied=True)
    return build(Run("policy", folder))


@pytest.fixture(scope="module")
def clean(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_dir = tmp_path_factory.mktemp("clean")
    store.prepare(model, save_dir, 1, "actor", META, copied=False)()
    folders.commit(save_dir, 1)
    return layout.iteration_folder(save_dir, 1)


@pytest.fixture
def checkpoint(clean: Path, tmp_path: Path) -> Path:
    return shutil.copytree(clean, tmp_path / "checkpoint")


def metadata_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def write_metadata(folder: Path, metadata: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_common(folder: Path, exploit: Exploit) -> None:
    torch.save({"optimizer": exploit}, folder / "common.pt")


def in_common_as_an_old_pickle(folder: Path, exploit: Exploit) -> None:
    (folder / "common.pt").write_bytes(pickle.dumps(exploit, protocol=2))


def as_metadata(folder: Path, exploit: Exploit) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(exploit))


def inside_metadata(folder: Path, exploit: Exploit) -> None:
    metadata = metadata_of(folder)
    metadata.planner_data = exploit
    write_metadata(folder, metadata)


def in_a_shard(folder: Path, exploit: Exploit) -> None:
    """Instead of the first tensor of the model."""
    plant(folder, "embedding.word_embeddings.weight", exploit)


def plant(folder: Path, name: str, value: Any) -> None:
    content = io.BytesIO()
    torch.save(value, content)
    (folder / "planted.distcp").write_bytes(content.getvalue())
    metadata = metadata_of(folder)
    for index, place in metadata.storage_data.items():
        if index.fqn == name:
            place.relative_path, place.offset, place.length = "planted.distcp", 0, len(content.getvalue())
    write_metadata(folder, metadata)


def load_rehashed(model: Any, folder: Path) -> None:
    """Load a checkpoint whose hashes are right: who plants code writes these as well."""
    layout.write_meta(folder, replace(layout.read_meta(folder), files=describe_files(folder)))
    store.load(model, folder)


PLANTS = [in_common, in_common_as_an_old_pickle, as_metadata, inside_metadata, in_a_shard]


@pytest.mark.parametrize("plant_it", PLANTS)
def test_a_planted_file_is_refused_and_has_not_run(
    plant_it: Callable[[Path, Exploit], None], model: Any, checkpoint: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "it ran"
    plant_it(checkpoint, Exploit(marker))
    with pytest.raises(ResumeError) as caught:
        load_rehashed(model, checkpoint)
    assert caught.value.problems[0].id == "checkpoint-unsafe"
    assert not marker.exists()


@pytest.mark.parametrize("plant_it", PLANTS)
def test_the_plants_are_live(plant_it: Callable[[Path, Exploit], None], checkpoint: Path, tmp_path: Path) -> None:
    marker = tmp_path / "it ran"
    plant_it(checkpoint, Exploit(marker))
    metadata_of(checkpoint)
    if not marker.exists():
        planted = checkpoint / ("planted.distcp" if plant_it is in_a_shard else "common.pt")
        if plant_it is in_common_as_an_old_pickle:
            pickle.loads(planted.read_bytes())
        else:
            torch.load(planted, weights_only=False)
    assert marker.exists()


def test_an_untouched_checkpoint_loads(model: Any, checkpoint: Path) -> None:
    assert store.load(model, checkpoint).iteration == 1


@pytest.mark.usefixtures("model")
def test_an_object_among_the_shards_is_read_as_plain_values(tmp_path: Path) -> None:
    """Our own checkpoints hold none; those of other programs do."""
    folder, marker = tmp_path / "objects", tmp_path / "it ran"
    folder.mkdir()
    checkpointing.prepare(objects({"step": 3}), copied=False)(folder, None)
    assert checkpointing.load(objects(None), folder)["thing"] == {"step": 3}
    plant(folder, "thing/shard_0_1", [Exploit(marker)])
    with pytest.raises(ResumeError) as caught:
        checkpointing.load(objects(None), folder)
    assert caught.value.problems[0].id == "checkpoint-unsafe"
    assert not marker.exists()


@pytest.mark.usefixtures("model")
def test_what_a_layer_would_unpickle_itself_is_refused(tmp_path: Path) -> None:
    """TransformerEngine keeps a pickle inside a tensor of bytes."""
    hidden = torch.frombuffer(bytearray(pickle.dumps({"recipe": 1})), dtype=torch.uint8)
    for number, value in enumerate([torch.empty(0, dtype=torch.uint8), None, hidden]):
        folder = tmp_path / str(number)
        folder.mkdir()
        checkpointing.prepare(objects(value, "layer._extra_state"), copied=False)(folder, None)
        if value is not hidden:
            checkpointing.load(objects(None, "layer._extra_state"), folder)
            continue
        with pytest.raises(ResumeError, match="would be unpickled"):
            checkpointing.load(objects(None, "layer._extra_state"), folder)


def objects(value: Any, name: str = "thing") -> dict[str, Any]:
    return {"thing": ShardedObject(name, value, (1,), (0,)), "common": {"note": "kept"}}


@pytest.mark.parametrize("path", ["../elsewhere.distcp", "/etc/passwd"])
def test_metadata_may_not_name_files_outside(path: str, model: Any, checkpoint: Path) -> None:
    metadata = metadata_of(checkpoint)
    for place in metadata.storage_data.values():
        place.relative_path = path
    write_metadata(checkpoint, metadata)
    with pytest.raises(ResumeError, match="outside the checkpoint"):
        load_rehashed(model, checkpoint)


@pytest.mark.parametrize("name", ["common.pt", ".metadata", "metadata.json", "__0_0.distcp"])
def test_links_out_of_the_folder_are_refused(name: str, model: Any, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / name).rename(tmp_path / "outside")
    (checkpoint / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ResumeError, match="leads out of the checkpoint"):
        store.load(model, checkpoint)


@pytest.mark.parametrize("name", ["common.pt", ".metadata", "metadata.json"])
@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04", b"garbage", b"[" * 100_000, pickle.dumps({}), pickle.dumps(None), b"{}"]
)
def test_garbage_is_refused(name: str, content: bytes, model: Any, checkpoint: Path) -> None:
    (checkpoint / name).write_bytes(content)
    with pytest.raises(ResumeError):
        load_rehashed(model, checkpoint)


def test_a_class_in_metadata_cannot_be_changed_for_later_loads(checkpoint: Path) -> None:
    """A pickle may set attributes of what it names; here that is a class of this one load."""
    name = b"torch.distributed.checkpoint.metadata\nMetadata\n"
    attack = b"\x80\x02c" + name + b"N}X\x07\x00\x00\x00versionI1\ns\x86b."
    original = (checkpoint / ".metadata").read_bytes()
    (checkpoint / ".metadata").write_bytes(attack)
    with pytest.raises(ResumeError):
        safe_load.read_metadata(checkpoint)
    (checkpoint / ".metadata").write_bytes(original)
    assert safe_load.read_metadata(checkpoint).version is None


def test_metadata_is_read_as_torch_reads_it(checkpoint: Path) -> None:
    ours, theirs = safe_load.read_metadata(checkpoint), metadata_of(checkpoint)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    index = next(index for index in ours.storage_data if index.offset is not None)
    assert isinstance(index, MetadataIndex)


@pytest.mark.parametrize("length", [-1, 1.5, "7", None])
def test_lengths_that_are_no_lengths_are_refused(length: Any, checkpoint: Path) -> None:
    metadata = metadata_of(checkpoint)
    next(iter(metadata.storage_data.values())).length = length
    write_metadata(checkpoint, metadata)
    with pytest.raises(ResumeError):
        safe_load.read_metadata(checkpoint)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"python": None},
        {"python": {"words": "AAAA", "position": 0, "gauss": None}},
        {"python": {"words": "not base64", "position": 0, "gauss": None}},
        {"numpy": {"position": 10**6}},
        {"numpy": {"gauss": "x"}},
        {"torch": "AAAA"},
        {"torch": 7},
    ],
)
def test_a_random_state_that_is_none_is_refused(broken: dict[str, Any]) -> None:
    state = random_state.capture()
    for name, value in broken.items():
        state[name] = state[name] | value if isinstance(value, dict) else value
    with pytest.raises(ResumeError, match="random generators"):
        random_state.restore(state if broken else {})


def test_a_save_that_the_disk_refuses_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpointing.HashingFileSystem, "create_stream", full)
    with pytest.raises(Exception, match="No space left on device"):
        store.prepare(model, tmp_path, 1, "actor", META, copied=False)()
    assert list(tmp_path.iterdir()) == []
