"""A Ray cluster of several nodes on this machine: placement, a node without a plugin, a node that is lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from relax_cli.backends.rollout.targets import this_node
from relax_cli.engine.build import WorkerSpec
from relax_cli.engine.ray.launch import find_places, server_places
from relax_cli.engine.ray.ranks import RayRanks, RoleWorker
from relax_cli.engine.ray.watch import ProcessWatch
from relax_cli.errors import ConfigError, EnvironmentFault
from tests.support.fault_runs import Folders, Zygote, arguments
from tests.support.plugin_files import estimator_source, write_plugin

pytestmark = pytest.mark.slow

STEPS = ["--num-rollout", "30", "--keep-checkpoints", "2"]


@pytest.fixture(scope="module")
def plugin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distribution that only one node has."""
    folder = tmp_path_factory.mktemp("plugin")
    write_plugin(folder, "elsewhere", estimator_source("elsewhere"))
    return folder


@pytest.fixture(scope="module")
def cluster(plugin_folder: Path) -> Iterator[Cluster]:
    """A head without CPUs and two nodes that believe in two GPUs; this process is a driver of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "node_ip_address": "127.0.0.1"})
        add_node(made, 2, env_vars={"PYTHONPATH": str(plugin_folder)})
        add_node(made, 3)
        ray.init(made.address, log_to_driver=False, logging_level="ERROR")
        yield made
        ray.shutdown()
        made.shutdown()


def add_node(cluster: Cluster, number: int, **options: Any) -> Any:
    return cluster.add_node(num_cpus=4, num_gpus=2, node_ip_address=f"127.0.0.{number}", **options)


def test_a_server_has_the_gpus_of_one_node(cluster: Cluster) -> None:
    group = placement_group([{"CPU": 1, "GPU": 1}] * 4, strategy="PACK")
    ray.get(group.ready(), timeout=120)
    places = find_places(group)
    assert [(place.node, place.gpu) for place in places] == [
        (node, gpu) for node in ("127.0.0.2", "127.0.0.3") for gpu in ("0", "1")
    ]
    for server in server_places(places, 2, 2):
        assert len({place.node for place in server}) == 1
    with pytest.raises(EnvironmentFault, match="on 2 machines"):
        server_places(places, 4, 1)
    remove_placement_group(group)


def test_a_plugin_that_one_node_lacks_is_named(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    config = {"algorithm": {"advantage_estimator": "elsewhere"}}
    workers = []
    for rank, node in enumerate(sorted(cluster.worker_nodes, key=lambda node: str(node.node_ip_address))):
        strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        spec = WorkerSpec("critic", rank, 2, 1, config, tmp_path, tmp_path, None)
        workers.append(ray.remote(RoleWorker).options(num_cpus=0.5, scheduling_strategy=strategy).remote(spec))
    for worker, missing in zip(workers, (False, True), strict=True):
        ranks = RayRanks[Any]("critic", [worker], tmp_path, ProcessWatch(this_node()))
        asked = [worker.prepare.remote()]
        if missing:
            with pytest.raises(ConfigError, match=f"'elsewhere' on node {this_node()}"):
                ranks.collect(asked, "prepare")
        else:
            ranks.collect(asked, "prepare")
        ray.kill(worker)


@pytest.mark.timeout(900)
def test_a_run_outlives_the_nodes_it_is_on(cluster: Cluster, zygote: Zygote, task: Path, tmp_path: Path) -> None:
    straight, folders = Folders(tmp_path / "straight"), Folders(tmp_path / "lost")
    assert zygote.run(straight.root, arguments(task, straight, *STEPS)).code == 0
    argv = arguments(task, folders, *STEPS, "--launcher", "ray", "--max-restarts", "2")
    folders.root.mkdir()
    with (folders.root / "err").open("w") as err, (folders.root / "out").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "relax_cli", *argv],
            stdout=out,
            stderr=err,
            env=os.environ | {"RAY_ADDRESS": cluster.address},
        )

    def said(text: str) -> bool:
        return text in (folders.root / "err").read_text()

    def wait_for(ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 400
        while not ready():
            assert process.poll() is None, (folders.root / "err").read_text()
            assert time.monotonic() < deadline, (folders.root / "err").read_text()
            time.sleep(0.1)

    try:
        wait_for(lambda: said("step  1/30"))
        lose_node_of_actor(cluster, folders)
        wait_for(lambda: said("restart 1 of 2, from the newest pair") and bool(newest_steps(folders)))
        lose_node_of_actor(cluster, folders)
        wait_for(lambda: said("waiting up to 600 s: Ray has too few free logical CPUs"))
        assert said("restart 2 of 2, from the newest pair")
        add_node(cluster, 4)
        process.wait(400)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, (folders.root / "err").read_text()
    assert folders.metrics() == straight.metrics()
    assert folders.samples() == straight.samples()


def newest_steps(folders: Folders) -> list[str]:
    """Lines of steps since the last restart."""
    return re.findall(r"step +\d+/30", (folders.root / "err").read_text().rpartition("restart ")[2])


def lose_node_of_actor(cluster: Cluster, folders: Folders) -> None:
    """End every process of the node that the newest actor is on."""
    *_, node_id = re.findall(r"rank 0 of actor on node \S+ \((\w+)\)", (folders.run / "logs/actor-0.log").read_text())
    (node,) = [node for node in cluster.worker_nodes if node.node_id == node_id]
    cluster.remove_node(node, allow_graceful=False)
