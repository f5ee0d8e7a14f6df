"""The order of a save over both roles, and what is undone when a disk refuses."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relax_cli.checkpoint import folders, layout
from relax_cli.config.schema import BatchSection, CheckpointSection, Config, CriticSection, RunSection
from relax_cli.engine import saving
from relax_cli.engine.saving import PairSaver
from relax_cli.engine.session import Ranks, Roles, Session, TrainedGroup, recorded
from relax_cli.engine.step import StepRecord
from relax_cli.engine.stopping import StopRequest
from relax_cli.engine.trainer import Trainer
from relax_cli.errors import Problem, RunError
from relax_cli.roles.run_folder import run_folder_errors
from relax_cli.tracking.run_files import MetricsWriter
from tests.support import checkpoints

Calls = list[tuple[str, str]]
FOLDER_STEPS = ("commit", "publish", "rotate", "withdraw")


@dataclass
class Disk:
    """Notes what roles and folders are asked to do; `broken` fails."""

    calls: Calls = field(default_factory=list)
    broken: tuple[str, str] = ("", "")
    """Role and step."""
    rule: str = "storage-failed"

    def do(self, role: str, step: str) -> None:
        self.calls.append((role, step))
        if (role, step) == self.broken:
            raise RunError(Problem(self.rule, "writing failed", "make room", where="/disk"))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    watched = Disk()
    for step in FOLDER_STEPS:
        monkeypatch.setattr(folders, step, lambda folder, *_, step=step: watched.do(folder.name, step))
    return watched


class Recorded(Ranks[Any]):
    """A role that saves nothing."""

    def __init__(self, name: str, disk: Disk) -> None:
        super().__init__(name)
        self.disk = disk
        self.meta: list[dict[str, Any]] = []

    def start(self, request: Callable[[Any], Any]) -> Callable[[], list[Any]]:
        call = recorded(request)
        if call.method in ("write_checkpoint", "copy_checkpoint"):
            self.meta.append(call.args[1])
        if call.method not in ("wake", "sleep"):
            self.disk.do(self.name, call.method.removesuffix("_checkpoint"))
        return lambda: [None]

    def tell(self, request: Callable[[Any], Any]) -> None:
        self.start(request)

    def on(self, rank: int, request: Callable[[Any], Any]) -> Any:
        self.start(request)


def saver(disk: Disk, warnings: list[str], root: Path = Path(), **section: Any) -> PairSaver:
    roles = [TrainedGroup(Recorded(name, disk)) for name in ("actor", "critic")]
    checkpoint = CheckpointSection(save=str(root / "actor"), **section)
    config = Config(checkpoint=checkpoint, critic=CriticSection(critic_save=str(root / "critic")))
    return PairSaver(roles, config, {"seed": 1}, warn=warnings.append)


def save(pair: PairSaver) -> None:
    """All of a save."""
    pair.prepare(3)
    pair.complete()
    pair.publish()


def both(*steps: str) -> Calls:
    """What happens to the actor and then to the critic, step by step."""
    return [(role, step) for step in steps for role in ("actor", "critic")]


def test_both_are_complete_before_either_counts(disk: Disk) -> None:
    pair = saver(disk, [])
    pair.prepare(3)
    assert disk.calls == both("write", "commit")
    assert pair.saved is None
    pair.publish()
    counted = both("write", "commit", "publish", "rotate")
    assert disk.calls == counted
    assert pair.saved == 3
    pair.publish()
    assert disk.calls == counted, "there is nothing more to publish"


def test_a_copied_pair_counts_when_both_halves_are_written(disk: Disk, tmp_path: Path) -> None:
    pair = saver(disk, [], tmp_path, async_save=True)
    halves = [layout.temporary_folder(folder, 3) for folder in pair.folders]
    for half in halves:
        half.mkdir(parents=True)
    pair.prepare(3)
    assert disk.calls == both("copy")
    for half in halves:
        assert not pair.is_written
        (half / layout.META_FILE).touch()
    assert pair.is_written
    pair.complete()
    assert pair.saved is None, "the metrics of its steps may not be on the disk yet"
    pair.publish()
    assert disk.calls == both("copy", "finish", "commit", "publish", "rotate")
    assert pair.saved == 3


@pytest.mark.parametrize("written", [1, 2])
def test_after_a_failure_the_files_tell_whether_a_pair_is_whole(
    disk: Disk, tmp_path: Path, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "PATIENCE", 0.1)
    pair = saver(disk, [], tmp_path, async_save=True)
    for number, folder in enumerate(pair.folders):
        half = layout.temporary_folder(folder, 3)
        half.mkdir(parents=True)
        if number < written:
            (half / layout.META_FILE).touch()
    pair.prepare(3)
    pair.outlast()
    pair.publish()
    assert pair.saved == (3 if written == 2 else None)
    assert disk.calls == both("copy", *(["commit", "publish", "rotate"] if written == 2 else []))


def test_both_halves_carry_one_name_and_another_save_another(disk: Disk) -> None:
    pair = saver(disk, [])
    for iteration in (1, 2):
        pair.prepare(iteration)
        pair.publish()
    actor, critic = (role.ranks.meta for role in pair.roles if isinstance(role.ranks, Recorded))
    assert [m["save_id"] for m in actor] == [m["save_id"] for m in critic]
    assert actor[0]["save_id"] != actor[1]["save_id"]
    assert all(m["seed"] == 1 for m in actor)


@pytest.mark.parametrize("broken", ["write", "copy", "finish", "commit", "publish"])
@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_failure_takes_both_halves_back(disk: Disk, broken: str, role: str, policy: str) -> None:
    warnings: list[str] = []
    disk.broken = (role, broken)
    pair = saver(disk, warnings, on_save_error=policy, async_save=broken in ("copy", "finish"))
    if policy == "stop":
        with pytest.raises(RunError):
            save(pair)
        assert not warnings
    else:
        save(pair)
        assert len(warnings) == 1
        assert "iteration 3 is not saved" in warnings[0]
    assert disk.calls[-2:] == both("withdraw")
    if pair.section.async_save:
        assert disk.calls[-4:-2] == both("finish"), "nothing is taken back that is still being written"
    assert pair.saved is None
    assert pair.pending is None


def test_an_old_checkpoint_that_stays_is_a_warning_only(disk: Disk) -> None:
    warnings: list[str] = []
    disk.broken = ("critic", "rotate")
    pair = saver(disk, warnings)
    save(pair)
    assert pair.saved == 3
    assert len(warnings) == 1
    assert "old checkpoints" in warnings[0]


def test_a_failure_other_than_the_disk_always_ends_the_run(disk: Disk) -> None:
    disk.broken, disk.rule = ("critic", "write"), "worker-failed"
    with pytest.raises(RunError, match="writing failed"):
        saver(disk, [], on_save_error="continue").prepare(3)
    assert ("actor", "withdraw") not in disk.calls


def test_an_abandoned_pair_is_taken_back_and_never_counts(disk: Disk) -> None:
    pair = saver(disk, [])
    pair.prepare(3)
    pair.abandon()
    pair.publish()
    assert disk.calls[-2:] == both("withdraw")
    assert pair.saved is None


def test_without_a_save_folder_nothing_happens(disk: Disk) -> None:
    save(PairSaver([TrainedGroup(Recorded("actor", disk))], Config(), {}, warn=print))
    assert not disk.calls


class Quiet:
    """A watcher that only keeps warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.display = self

    def step(self, rollout_id: int, metrics: dict[str, Any]) -> None:
        self.warnings += [warning["seen"] for warning in metrics.get("warnings", ())]

    def evaluated(self, step: int, metrics: dict[str, Any]) -> None: ...

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def status(self, text: str) -> None: ...

    def phase(self, name: str) -> None: ...


def trained(rewards: list[tuple[float, float]], disk: Disk, watcher: Any, **checkpoint: Any) -> Trainer:
    """The trainer after one rollout for each (lowest, highest) reward."""
    role = Recorded("actor", disk)
    section = CheckpointSection(**{"save": "actor", "save_interval": 1, **checkpoint})
    config = Config(batch=BatchSection(num_rollout=len(rewards)), checkpoint=section, run=RunSection(run_dir="run"))
    session = cast(Session, SimpleNamespace(roles=Roles.of({"rollout": role, "actor": role})))
    stop = StopRequest(lambda _: None)
    trainer = Trainer(session, config, watcher, stop, first=0, dump_fields=[], checkpoint_meta={})
    for number, (low, high) in enumerate(rewards):
        metrics = {"reward/mean": (low + high) / 2, "reward/min": low, "reward/max": high}
        counts = {"tokens/total": 1.0, "tokens/response": 1.0}
        record = StepRecord(number, lambda _: None, metrics | counts, {"rollout": 1.0})
        trainer._end_step(record, time.perf_counter())
    return trainer


@pytest.mark.parametrize(("interval", "saved"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5]), (None, [5])])
def test_a_run_saves_at_its_interval_and_at_its_end(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, interval: int | None, saved: list[int]
) -> None:
    found: list[int] = []
    monkeypatch.setattr(folders, "rotate", lambda _, current, *rest: found.append(current))
    trained([(0.0, 1.0)] * 5, disk, Quiet(), save_interval=interval)
    assert found == saved


@pytest.mark.parametrize("dies_after", [2, 3, None])
def test_the_last_pair_of_a_living_policy_is_kept(
    disk: Disk, dies_after: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int | None] = []

    def note(_: object, current: int, keep: int, protected: list[int]) -> None:
        kept.append(next(iter(protected), None))

    monkeypatch.setattr(folders, "rotate", note)
    watcher, alive = Quiet(), dies_after or 6
    trained([(0.0, 1.0)] * alive + [(0.0, 0.0)] * (6 - alive), disk, watcher, keep_checkpoints=2)
    # Iteration N was seen alive by rollout N: the pair saved after the last such rollout is dead already.
    assert kept == [None] * alive + [alive - 1] * (6 - alive)
    assert [f"iteration {alive - 1} was saved before" in warning for warning in watcher.warnings] == [True] * (
        alive < 6
    )


def test_one_checkpoint_is_the_newest_however_dead(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    protected: list[Any] = []
    monkeypatch.setattr(folders, "rotate", lambda _, current, keep, kept: protected.extend(kept))
    watcher = Quiet()
    trained([(0.0, 1.0)] * 2 + [(0.0, 0.0)] * 4, disk, watcher, keep_checkpoints=1)
    assert protected == []
    assert watcher.warnings
    assert not any("saved before" in warning for warning in watcher.warnings)


class Full(Quiet):
    """A watcher whose disk is full."""

    def step(self, rollout_id: int, metrics: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/run/metrics.jsonl")

    def warn(self, message: str) -> None:
        raise AssertionError(message)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_pair_whose_metrics_cannot_be_written_is_taken_back(disk: Disk, async_save: bool) -> None:
    with pytest.raises(OSError, match="No space left"):
        trained([(0.0, 0.0)], disk, Full(), async_save=async_save)
    written = ["copy", "finish"] if async_save else ["write", "commit"]
    assert [step for _, step in disk.calls] == [*written, "withdraw"]


def test_a_full_disk_under_the_run_folder_is_a_run_error() -> None:
    with pytest.raises(RunError, match="No space left") as caught, run_folder_errors(Path("/run")):
        Full().step(0, {})
    assert caught.value.problems[0].where == "/run/metrics.jsonl"
    with pytest.raises(FileNotFoundError), run_folder_errors(Path("/run")):
        raise FileNotFoundError(errno.ENOENT, "no such file", "x")


@pytest.mark.parametrize(
    ("number", "place", "said"),
    [
        (errno.ENOSPC, None, "cannot be written: No space left"),
        (errno.ENOSPC, "{}/rollouts/x", "cannot be written: No space left"),
        (errno.EDQUOT, "/elsewhere", "cannot be written"),
        (errno.EROFS, "{}/metrics.jsonl", "cannot be written: Read-only"),
        (errno.ENAMETOOLONG, "{}/metrics.jsonl", "cannot be written: File name too long"),
        (errno.ENOENT, "{}/rollouts/step_000001.jsonl", "was removed or renamed"),
        (errno.ENOTDIR, "{}/rollouts/step_000001.jsonl", "was removed or renamed"),
        (errno.EEXIST, "{}/rollouts", "cannot be written: File exists"),
        (errno.EFBIG, "{}/metrics.jsonl", "cannot be written: File too large"),
    ],
)
def test_every_failure_of_the_run_folder_is_named(number: int, place: str | None, said: str, tmp_path: Path) -> None:
    name = None if place is None else place.format(tmp_path)
    with pytest.raises(RunError, match=said) as caught, run_folder_errors(tmp_path):
        raise OSError(number, os.strerror(number), *([] if name is None else [name]))
    (problem,) = caught.value.problems
    assert problem.id == "run-folder-failed"
    assert problem.where == (name or str(tmp_path))
    hints = {errno.EEXIST: "rename or remove", errno.EFBIG: "ulimit -f", errno.ENOENT: "leave", errno.ENOTDIR: "leave"}
    assert problem.fix.startswith(hints.get(number, "make room"))


def test_a_metrics_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    def fail() -> None:
        with MetricsWriter(tmp_path) as writer:
            descriptor = os.open("/dev/full", os.O_WRONLY)
            os.dup2(descriptor, writer._file.fileno())
            os.close(descriptor)
            writer._file.write("not yet on the disk")
            raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        fail()


@pytest.mark.parametrize("async_save", [False, True])
def test_a_pair_counts_once_its_samples_are_on_the_disk(disk: Disk, async_save: bool) -> None:
    trained([(0.0, 1.0)], disk, Quiet(), async_save=async_save)
    made = [name for _, name in disk.calls]
    assert made.index("commit") < made.index("finish_dump") < made.index("publish")


def test_a_pair_whose_samples_cannot_be_written_is_taken_back(disk: Disk) -> None:
    disk.broken, disk.rule = ("actor", "finish_dump"), "run-folder-failed"
    with pytest.raises(RunError, match="writing failed"):
        trained([(0.0, 1.0)], disk, Quiet())
    assert [name for _, name in disk.calls] == ["write", "commit", "finish_dump", "withdraw"]


def test_a_withdrawn_save_leaves_the_one_before(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, "actor", 1, 2, 3)
    layout.write_tracker(tmp_path, 3)
    folders.withdraw(tmp_path, 3)
    assert layout.read_tracker(tmp_path).iteration == 2
