"""The order of a save over both roles, and what is undone when a disk refuses."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relax_cli.config.schema import BatchSection, CheckpointSection, Config, RunSection
from relax_cli.engine.groups import Ranks, Roles, TrainedGroup, recorded
from relax_cli.engine.saving import PairSaver
from relax_cli.engine.session import Session
from relax_cli.engine.step import StepRecord
from relax_cli.engine.stopping import StopRequest
from relax_cli.engine.trainer import Trainer
from relax_cli.errors import Problem, RunError
from relax_cli.roles.run_folder import run_folder_errors
from relax_cli.tracking.writers import MetricsWriter

Calls = list[tuple[str, str]]


class Recorded(Ranks[Any]):
    """Notes what it is asked to do; `broken` fails."""

    def __init__(self, name: str, calls: Calls, broken: str = "", rule: str = "storage-failed") -> None:
        super().__init__(name, count=1)
        self.calls, self.broken, self.rule = calls, broken, rule
        self.meta: list[dict[str, Any]] = []

    def start(self, request: Callable[[Any], Any]) -> Callable[[], list[Any]]:
        call = recorded(request)
        if call.method == "write_checkpoint":
            self.meta.append(call.args[1])
        if call.method not in ("wake", "sleep"):
            self.on(0, request)
        return lambda: [None]

    def tell(self, request: Callable[[Any], Any]) -> None:
        self.start(request)

    def on(self, rank: int, request: Callable[[Any], Any]) -> Any:
        method = recorded(request).method
        self.calls.append((self.name, method.removesuffix("_checkpoint").removesuffix("_checkpoints")))
        if method == self.broken:
            raise RunError(Problem(self.rule, "writing failed", "make room", where="/disk"))


def saver(calls: Calls, warnings: list[str], broken: str = "", asked: str = "stop", **kwargs: str) -> PairSaver:
    roles = [TrainedGroup(Recorded("actor", calls)), TrainedGroup(Recorded("critic", calls, broken, **kwargs))]
    section = CheckpointSection(save="actor", on_save_error=asked)  # type: ignore[arg-type]
    return PairSaver(roles, section, {"seed": 1}, warn=warnings.append)


def save(pair: PairSaver) -> None:
    """Both halves of a save."""
    pair.prepare(3)
    pair.publish()


def test_both_are_complete_before_either_counts() -> None:
    calls: Calls = []
    pair = saver(calls, [])
    pair.prepare(3)
    prepared = [("actor", "write"), ("critic", "write"), ("actor", "commit"), ("critic", "commit")]
    assert calls == prepared
    assert pair.saved is None
    pair.publish()
    counted = [(role, step) for step in ("publish", "rotate") for role in ("actor", "critic")]
    assert calls == prepared + counted
    assert pair.saved == 3
    pair.publish()
    assert calls == prepared + counted, "there is nothing more to publish"


def test_both_halves_carry_one_name_and_another_save_another() -> None:
    pair = saver([], [])
    for iteration in (1, 2):
        pair.prepare(iteration)
        pair.publish()
    actor, critic = (role.ranks.meta for role in pair.roles if isinstance(role.ranks, Recorded))
    assert [m["save_id"] for m in actor] == [m["save_id"] for m in critic]
    assert actor[0]["save_id"] != actor[1]["save_id"]
    assert all(m["seed"] == 1 for m in actor)


@pytest.mark.parametrize("broken", ["write_checkpoint", "commit_checkpoint", "publish_checkpoint"])
@pytest.mark.parametrize("asked", ["stop", "continue"])
def test_a_failure_takes_both_halves_back(broken: str, asked: str) -> None:
    calls: Calls = []
    warnings: list[str] = []
    pair = saver(calls, warnings, broken, asked)
    if asked == "stop":
        with pytest.raises(RunError):
            save(pair)
        assert not warnings
    else:
        save(pair)
        assert len(warnings) == 1
        assert "iteration 3 is not saved" in warnings[0]
    assert calls[-2:] == [("actor", "withdraw"), ("critic", "withdraw")]
    assert pair.saved is None


def test_an_old_checkpoint_that_stays_is_a_warning_only() -> None:
    warnings: list[str] = []
    pair = saver([], warnings, "rotate_checkpoints")
    pair.prepare(3)
    pair.publish()
    assert pair.saved == 3
    assert len(warnings) == 1
    assert "old checkpoints" in warnings[0]


def test_a_failure_other_than_the_disk_always_ends_the_run() -> None:
    calls: Calls = []
    with pytest.raises(RunError, match="writing failed"):
        saver(calls, [], "write_checkpoint", "continue", rule="worker-failed").prepare(3)
    assert ("actor", "withdraw") not in calls


def test_an_abandoned_pair_is_taken_back_and_never_counts() -> None:
    calls: Calls = []
    pair = saver(calls, [])
    pair.prepare(3)
    pair.abandon()
    pair.publish()
    assert calls[-2:] == [("actor", "withdraw"), ("critic", "withdraw")]
    assert pair.saved is None


def test_without_a_save_folder_nothing_happens() -> None:
    calls: Calls = []
    pair = PairSaver([TrainedGroup(Recorded("actor", calls))], CheckpointSection(), {}, warn=print)
    pair.prepare(3)
    pair.publish()
    assert not calls


class Quiet:
    """A watcher that only keeps warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def step(self, rollout_id: int, metrics: dict[str, Any]) -> None:
        self.warnings += [warning["seen"] for warning in metrics.get("warnings", ())]

    def evaluated(self, step: int, metrics: dict[str, Any]) -> None: ...

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def status(self, text: str) -> None: ...

    def phase(self, name: str) -> None: ...


def trained(
    rewards: list[tuple[float, float]],
    calls: Calls,
    watcher: Quiet,
    role: Recorded | None = None,
    **checkpoint: Any,
) -> Trainer:
    """The trainer after one rollout for each (lowest, highest) reward."""
    role = role or Recorded("actor", calls)
    section = CheckpointSection(save="actor", save_interval=1, **checkpoint)
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


@pytest.mark.parametrize("dies_after", [2, 3, None])
def test_the_last_pair_of_a_living_policy_is_kept(dies_after: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int | None] = []

    def note(_: object, current: int, keep: int, protected: list[int]) -> None:
        kept.append(next(iter(protected), None))

    monkeypatch.setattr(TrainedGroup, "rotate_checkpoints", note)
    watcher, alive = Quiet(), dies_after or 6
    trained([(0.0, 1.0)] * alive + [(0.0, 0.0)] * (6 - alive), [], watcher, keep_checkpoints=2)
    # Iteration N was seen alive by rollout N: the pair saved after the last such rollout is dead already.
    assert kept == [None] * alive + [alive - 1] * (6 - alive)
    assert [f"iteration {alive - 1} was saved before" in warning for warning in watcher.warnings] == [True] * (
        alive < 6
    )


class Full:
    """A watcher whose disk is full."""

    def step(self, rollout_id: int, metrics: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/run/metrics.jsonl")

    def evaluated(self, step: int, metrics: dict[str, Any]) -> None: ...

    def warn(self, message: str) -> None:
        raise AssertionError(message)

    def status(self, text: str) -> None: ...

    def phase(self, name: str) -> None: ...


def test_a_pair_whose_metrics_cannot_be_written_is_taken_back() -> None:
    calls: Calls = []
    role = Recorded("actor", calls)
    config = Config(batch=BatchSection(num_rollout=2), checkpoint=CheckpointSection(save="actor", save_interval=1))
    trainer = Trainer(
        cast(Session, SimpleNamespace(roles=Roles.of({"rollout": role, "actor": role}))),
        config,
        Full(),
        StopRequest(lambda _: None),
        first=0,
        dump_fields=[],
        checkpoint_meta={},
    )
    record = StepRecord(
        0, lambda _: None, {"tokens/total": 1.0, "tokens/response": 1.0, "reward/mean": 0.0}, {"rollout": 1.0}
    )
    with pytest.raises(OSError, match="No space left"):
        trainer._end_step(record, time.perf_counter())
    assert calls == [("actor", "write"), ("actor", "commit"), ("actor", "withdraw")]
    assert trainer.report.saved_iteration is None


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
    ],
)
def test_every_failure_of_the_run_folder_is_named(number: int, place: str | None, said: str, tmp_path: Path) -> None:
    name = None if place is None else place.format(tmp_path)
    with pytest.raises(RunError, match=said) as caught, run_folder_errors(tmp_path):
        raise OSError(number, os.strerror(number), *([] if name is None else [name]))
    (problem,) = caught.value.problems
    assert problem.id == "run-folder-failed"
    assert problem.where == (name or str(tmp_path))
    assert problem.fix


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


@pytest.mark.parametrize("broken", ["", "finish_dump"])
def test_a_pair_counts_once_its_samples_are_on_the_disk(broken: str) -> None:
    calls: Calls = []
    if not broken:
        trained([(0.0, 1.0)], calls, Quiet())
        made = [name for _, name in calls]
        assert made.index("commit") < made.index("finish_dump") < made.index("publish")
        return
    role = Recorded("actor", calls, broken, "run-folder-failed")
    with pytest.raises(RunError, match="writing failed"):
        trained([(0.0, 1.0)], calls, Quiet(), role=role)
    assert [name for _, name in calls] == ["write", "commit", "finish_dump", "withdraw"]
