"""Placement on GPUs and workers that fail, with a real Ray that believes in two GPUs."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from relax_cli.backends.rollout.targets import this_node
from relax_cli.engine.build import WorkerSpec
from relax_cli.engine.ray import watch as watching
from relax_cli.engine.ray.launch import SHARE, find_places, server_places
from relax_cli.engine.ray.ranks import RayRanks, RoleWorker, disregard
from relax_cli.engine.ray.watch import ProcessWatch
from relax_cli.engine.session import Call
from relax_cli.errors import ConfigError, Problem, RunError


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of a Ray with two GPUs that are none."""
    context = ray.init(
        address="local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()


@ray.remote
class Seer:
    """Tells what the worker of a role would see."""

    def gpus(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


def seen_in(group: Any, bundle: int) -> Any:
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
    return Seer.options(num_cpus=SHARE, num_gpus=SHARE, scheduling_strategy=strategy).remote()


@ray.remote(num_cpus=SHARE)
class Failing:
    """A worker whose method fails as it is told: after some seconds, so that all ranks can have begun."""

    def run(self, method: str, seconds: float) -> None:
        time.sleep(seconds)
        raise RunError(Problem(id=f"{method}-failed", message="failed", fix="look"))


class Delayed:
    """Stands before a worker and passes on another number of seconds."""

    def __init__(self, worker: Any, seconds: float) -> None:
        self.run = self
        self.remote = lambda call: worker.run.remote(getattr(call, "method", call), seconds)


@pytest.fixture
def overlooked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Errors that Ray would print because nobody read them."""
    found: list[str] = []
    monkeypatch.setattr("ray._private.worker._unhandled_error_handler", lambda error: found.append(str(error)))
    return found


def test_ranks_that_fail_after_the_first_print_nothing(cluster: str, tmp_path: Path, overlooked: list[str]) -> None:
    workers = [Failing.remote() for _ in range(3)]
    warm = [worker.run.remote("warm", 0.0) for worker in workers]
    disregard(warm)
    ray.wait(warm, num_returns=len(warm))
    # Without care both would be printed: what failed before and what fails later.
    delayed = [Delayed(worker, seconds) for worker, seconds in zip(workers, (0.0, 0.0, 1.0), strict=True)]
    with pytest.raises(RunError) as caught:
        RayRanks[Any]("rollout", delayed, tmp_path, ProcessWatch("here")).all(lambda role: role.generate())
    assert caught.value.problems[0].id == "generate-failed"
    # Ray looks when a reference goes; the error and its frames hold them.
    del caught
    gc.collect()
    time.sleep(2.0)
    assert overlooked == []
    # The same calls, dropped: Ray does notice.
    for worker in delayed:
        worker.remote("generate")
    deadline = time.monotonic() + 30
    while len(overlooked) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(overlooked) == 3


def test_a_server_gets_the_gpus_of_its_bundles(cluster: str) -> None:
    group = placement_group([{"CPU": 1, "GPU": 1}] * 2, strategy="PACK")
    ray.get(group.ready())
    places = find_places(group)
    assert [place.gpu for place in places] == ["0", "1"]
    assert len({place.node for place in places}) == 1
    # Roles that take turns share the GPU of their bundle.
    roles = [[seen_in(group, place.bundle) for place in places] for _ in range(2)]
    assert [ray.get([worker.gpus.remote() for worker in role]) for role in roles] == [["0", "1"]] * 2
    (server,) = server_places(places, 2, 1)
    assert [place.gpu for place in server] == ["0", "1"]


def test_the_gpus_of_a_cluster_can_be_asked_for(cluster: str) -> None:
    code = "from relax_cli.engine.ray.start import cluster_gpus; print(cluster_gpus())"
    environment = os.environ | {"RAY_ADDRESS": cluster}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert told.stdout.strip() == "2"


@ray.remote(num_cpus=SHARE)
class Doomed(RoleWorker):
    """A worker whose role executes what it is told."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        super().__init__(WorkerSpec("critic", rank, 2, 1, {}, run_dir, run_dir, None))
        self.role = Obedient()


class Obedient:
    def do(self, code: str) -> None:
        exec(code)


@pytest.fixture
def critic(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RayRanks[Any]:
    """Two ranks, watched."""
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(watching, "LOOK_SECONDS", 0.2)
    workers = [Doomed.remote(tmp_path, rank) for rank in range(2)]
    ranks = RayRanks[Any]("critic", workers, tmp_path, ProcessWatch(this_node()))
    ranks.watch_all()
    return ranks


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "rank 1 of critic is gone: .*(SIGKILL|without a word).* `do`"),
        ("import os; os._exit(0)", "rank 1 of critic is gone: .*(code 0|without a word).* `do`"),
        ("import sys; sys.exit('no key')", "rank 1 of critic failed in `do`"),
        ("1 / 0", "rank 1 of critic failed in `do`"),
    ],
)
def test_the_call_that_fails_is_the_one_named(critic: RayRanks[Any], tmp_path: Path, code: str, said: str) -> None:
    with pytest.raises(RunError, match=said) as caught:
        critic.on(1, lambda role: role.do(code))
    (problem,) = caught.value.problems
    assert problem.id == "worker-failed"
    log = (tmp_path / "logs" / "critic-1.log").read_text()
    assert "do" in log
    if "sys.exit" in code:
        assert "no key" in problem.got
    if "1 / 0" in code:
        assert "ZeroDivisionError" in log


def test_a_rank_that_dies_is_named_within_seconds(critic: RayRanks[Any]) -> None:
    critic.start(lambda role: role.do("import os, threading; threading.Timer(1, os._exit, [1]).start()"))()
    started = time.monotonic()
    with pytest.raises(RunError, match=r"rank \d of critic is gone"):
        critic.on(0, lambda role: role.do("import time; time.sleep(300)"))
    assert time.monotonic() - started < 200


def test_a_broken_connection_is_put_down_to_the_rank_that_died(critic: RayRanks[Any]) -> None:
    with pytest.raises(RunError, match="rank 1 of critic is gone"):
        critic.collect(
            [
                critic.workers[0].run.remote(Call("do", ("raise RuntimeError('connection closed by peer')",))),
                critic.workers[1].run.remote(Call("do", ("import os, time; time.sleep(0.5); os._exit(1)",))),
            ],
            "do",
        )


def test_a_node_without_the_plugin_is_named_before_any_model(cluster: str, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    config = {"algorithm": {"advantage_estimator": "elsewhere"}}
    worker = ray.remote(RoleWorker).remote(WorkerSpec("critic", 0, 1, 1, config, tmp_path, tmp_path, None))
    ranks = RayRanks[Any]("critic", [worker], tmp_path, ProcessWatch(this_node()))
    with pytest.raises(ConfigError, match=f"'elsewhere' on node {this_node()}"):
        ranks.collect([worker.prepare.remote()], "prepare")


def test_processes_of_other_nodes_are_watched_from_there(
    critic: RayRanks[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = ProcessWatch("the driver's node")
    place = critic.collect([critic.workers[0].whereabouts.remote()], "whereabouts")[0]
    watch.add("rank 0 of critic", place)
    watch.settle("`do` of critic")
    os.kill(place.pid, 9)
    monkeypatch.setattr(watching, "SETTLE_SECONDS", 60)
    with pytest.raises(RunError, match="rank 0 of critic is gone"):
        watch.settle("`do` of critic")
