"""Processes that a run depends on: dead or stopped, by whatever cause, they are found and named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from relax_cli.engine.local import LocalRanks
from relax_cli.engine.ray import watch
from relax_cli.engine.ray.watch import ProcessTable, ProcessWatch, Whereabouts, children_named, exit_status, last_words
from relax_cli.engine.session import SleepingGroup
from relax_cli.errors import ProcessLost

SLEEPER = "import time; time.sleep(60)"


@pytest.fixture
def started() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", SLEEPER])
    yield process
    process.kill()
    process.wait()


def ended(code: str) -> str:
    """What is said of a process that executes `code`."""
    table = ProcessTable()
    process = subprocess.Popen([sys.executable, "-c", f"input(); {code}"], stdin=subprocess.PIPE)
    table.add("it", process.pid)
    assert table.losses() == []
    process.communicate(b"\n")
    (loss,) = table.losses()
    assert loss.name == "it"
    assert table.ending("it") == loss.what
    return loss.what


def kernel_tells() -> bool:
    """Whether this kernel knows the exit status of processes that are not children."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    handle = os.pidfd_open(process.pid)
    process.wait()
    return exit_status(handle) is not None


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 15)", "killed by SIGTERM"),
        ("import os; os.kill(os.getpid(), 6)", "killed by SIGABRT"),
        ("import os; os._exit(0)", "exited with code 0"),
        ("import sys; sys.exit(3)", "exited with code 3"),
    ],
)
def test_a_process_that_ended_is_named_with_its_signal(code: str, said: str) -> None:
    assert ended(code) == (said if kernel_tells() else watch.UNKNOWN_END)


def test_a_stopped_process_is_lost_only_after_a_while(
    started: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = ProcessTable()
    table.add("it", started.pid)
    started.send_signal(signal.SIGSTOP)
    while psutil.Process(started.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    assert table.losses() == []
    monkeypatch.setattr(watch, "STOPPED_SECONDS", 0.0)
    assert "stopped by a signal" in table.losses()[0].what
    started.send_signal(signal.SIGCONT)
    while psutil.Process(started.pid).status() == psutil.STATUS_STOPPED:
        time.sleep(0.01)
    assert table.losses() == []


def test_a_process_that_ended_before_it_was_watched_is_found() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    table = ProcessTable()
    table.add("it", process.pid)
    assert [loss.name for loss in table.losses()] == ["it"]


def test_the_memory_killer_is_suspected_only_when_it_was_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "want of memory" not in ended("import os; os._exit(1)")
    counts = iter([4, *[6] * 9])
    monkeypatch.setattr(watch, "memory_kills", lambda: next(counts))
    assert "the kernel has killed 2 processes for want of memory" in ended("import os; os._exit(1)")


def test_descendants_are_found_by_their_title(started: subprocess.Popen[bytes]) -> None:
    names = [Path(psutil.Process(started.pid).cmdline()[0]).name]
    assert started.pid in [pid for _, pid in children_named(psutil.Process(), *names)]
    assert children_named(psutil.Process(), "no-such-title") == []


def test_the_watch_names_process_call_node_and_log(started: subprocess.Popen[bytes], tmp_path: Path) -> None:
    log = tmp_path / "critic-0.log"
    log.write_text("12:00:00 predict\n")
    watch = ProcessWatch("here")
    watch.add("rank 0 of critic", Whereabouts("here", "", started.pid), log)
    watch.look("`generate` of rollout")
    started.kill()
    started.wait()
    watch._next_look = 0.0
    with pytest.raises(ProcessLost) as caught:
        watch.look("`generate` of rollout")
    (problem,) = caught.value.problems
    assert problem.id == "worker-failed"
    assert problem.message.startswith("rank 0 of critic is gone: ")
    assert problem.message.endswith("(during `generate` of rollout)")
    assert (problem.where, problem.got) == (f"node here, process {started.pid}", "its log ends with: 12:00:00 predict")
    assert str(log) in problem.fix


def test_a_process_without_a_log_is_a_loss_of_its_own_kind(started: subprocess.Popen[bytes]) -> None:
    watch = ProcessWatch("here")
    watch.add("Ray's raylet", Whereabouts("here", "", started.pid))
    started.kill()
    started.wait()
    with pytest.raises(ProcessLost) as caught:
        watch.settle("`train` of actor")
    assert caught.value.problems[0].id == "process-lost"
    assert watch.shutdown_hangs


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "its log is empty"),
        ("\n \n", "its log is empty"),
        ("a\nb\n\n", "its log ends with: b"),
        (None, "its log is empty"),
    ],
)
def test_the_last_words_of_a_log(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "x.log").write_text(text)
    assert last_words(tmp_path / "x.log") == said


class Broken:
    """A role whose work and clean-up both fail."""

    def wake(self) -> None: ...

    def sleep(self) -> None:
        raise RuntimeError("the clean-up failed")


def test_the_failure_of_a_block_is_not_hidden_by_its_clean_up() -> None:
    group = SleepingGroup(LocalRanks("critic", Broken()))
    with pytest.raises(ValueError, match="the first"), group.awake():
        raise ValueError("the first")
    with pytest.raises(RuntimeError, match="the clean-up"), group.awake():
        pass


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.OutOfMemoryError("Refer to the documentation"),
        ray.exceptions.RayError("killed due to the node running low on memory"),
    ],
)
def test_a_worker_that_ray_ends_for_memory_says_so(error: ray.exceptions.RayError, tmp_path: Path) -> None:
    watch = ProcessWatch("here")
    watch.add("rank 1 of actor", Whereabouts("here", "", 2**22 + 1), tmp_path / "actor-1.log")
    (problem,) = watch.died("rank 1 of actor", "its `train`", error).problems
    said = "Ray killed it because its node was low on memory"
    assert problem.message == f"rank 1 of actor is gone: {said} (during its `train`)"
    assert "--micro-batch-size" in problem.fix
