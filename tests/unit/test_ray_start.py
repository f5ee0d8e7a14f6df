"""A Ray that does not start, without Ray: what the user reads, and what is left behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.services import determine_plasma_store_config

from relax_cli.backends.ports import free_port
from relax_cli.config.layers import Layers
from relax_cli.config.placement import object_store_bytes, rollout_engine
from relax_cli.config.recipes import bundled_recipes
from relax_cli.config.schema import AlgorithmSection, Config, ModelSection, ParallelSection, RolloutSection
from relax_cli.engine.ray import start
from relax_cli.engine.ray.launch import RaySession
from relax_cli.engine.ray.start import check_resources, cluster_gpus, start_failed, start_ray
from relax_cli.errors import EnvironmentFault, ExitCode, Problem, RunError
from relax_cli.plugin.launch_plan import LaunchPlan
from relax_cli.plugin.manager import load_plugins
from relax_cli.preflight.check_run import check_run
from relax_cli.preflight.rules import machine as machine_rules
from relax_cli.preflight.rules.registry import RuleContext
from tests.support.rules import UNKNOWN

SLOW = "The current node timed out during startup.\nThis could happen because ..."


def plan_of(tmp_path: Path) -> LaunchPlan:
    nothing: Any = None
    return LaunchPlan(
        config=Config(),
        graph=nothing,
        model_folder=tmp_path,
        run_dir=tmp_path / "run",
        actor_load=None,
        critic_load=None,
        status=lambda text: None,
    )


class FakeInit:
    """`ray.init` that takes SIGTERM as the real one does, and then raises what it is given."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.asked: list[tuple[str | None, dict[str, Any]]] = []

    def __call__(self, address: str | None = None, **options: Any) -> None:
        self.asked.append((address, options))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.error is not None:
            raise self.error


def fake(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> FakeInit:
    init = FakeInit(error)
    monkeypatch.setattr(ray, "init", init)
    return init


def problem_of(caught: pytest.ExceptionInfo[EnvironmentFault]) -> Problem:
    (problem,) = caught.value.problems
    assert caught.value.exit_code is ExitCode.ENVIRONMENT
    assert problem.id == "ray-start-failed"
    return problem


@pytest.mark.parametrize("error", [Exception(SLOW), RuntimeError(SLOW), TimeoutError(SLOW), OSError(SLOW)])
def test_a_ray_that_does_not_start_is_a_fault_of_this_machine(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, error)
    ended: list[bool] = []
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(EnvironmentFault) as caught:
        RaySession(plan_of(tmp_path))
    problem = problem_of(caught)
    assert (problem.message, problem.where) == ("Ray did not start", "this machine")
    assert problem.got == f"{type(error).__name__}: The current node timed out during startup."
    assert "ray stop" in problem.fix
    assert signal.getsignal(signal.SIGTERM) is before
    assert ended == [True]


def calls(tmp_path: Path) -> tuple[Callable[[], object], ...]:
    """Everything that joins the cluster of RAY_ADDRESS."""
    return lambda: start_ray(plan_of(tmp_path)), cluster_gpus


@pytest.fixture
def listening() -> Iterator[str]:
    """An address where something listens, which is no Ray."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_cluster_that_refuses_is_named(tmp_path: Path, listening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", listening)
    init = fake(monkeypatch, ConnectionError("no answer"))
    before = signal.getsignal(signal.SIGTERM)
    for call in calls(tmp_path):
        with pytest.raises(EnvironmentFault) as caught:
            call()
        problem = problem_of(caught)
        assert (problem.where, problem.got) == (f"RAY_ADDRESS={listening}", "ConnectionError: no answer")
        assert f"ray status --address {listening}" in problem.fix
        assert signal.getsignal(signal.SIGTERM) is before
    assert [address for address, _ in init.asked] == [listening] * 2


@pytest.mark.parametrize(
    ("error", "fix"),
    [(SystemExit(1), "ray status --address"), (ValueError("Invalid Ray address"), "set RAY_ADDRESS to the HOST:PORT")],
)
def test_what_answers_need_not_be_ray(
    error: Any, fix: str, tmp_path: Path, listening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", listening)
    fake(monkeypatch, error)
    for call in calls(tmp_path):
        with pytest.raises(EnvironmentFault) as caught:
            call()
        assert fix in problem_of(caught).fix


def test_ray_is_not_asked_where_nothing_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on trying for minutes."""
    init = fake(monkeypatch, None)
    for address in (f"127.0.0.1:{free_port()}", "127.0.0.1:99999"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        for call in calls(tmp_path):
            with pytest.raises(EnvironmentFault) as caught:
                call()
            assert problem_of(caught).where == f"RAY_ADDRESS={address}"
    assert init.asked == []


@pytest.mark.parametrize("address", ["auto", "ray://127.0.0.1:1", "LISTENING", " LISTENING\n"])
def test_other_addresses_are_left_to_ray(
    address: str, listening: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = address.replace("LISTENING", listening)
    monkeypatch.setenv("RAY_ADDRESS", address)
    init = fake(monkeypatch, None)
    start_ray(plan_of(tmp_path))
    assert [asked for asked, _ in init.asked] == [address.strip()]


@pytest.mark.parametrize("address", ["", "local"])
def test_a_ray_that_starts_is_used(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    init = fake(monkeypatch, None)
    before = signal.getsignal(signal.SIGTERM)
    start_ray(plan_of(tmp_path))
    assert signal.getsignal(signal.SIGTERM) is before
    ((address, options),) = init.asked
    assert (address, options["include_dashboard"]) == ("local", False)
    assert options["num_cpus"] >= 2


def test_the_plugin_that_launches_is_not_to_blame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, Exception(SLOW))
    config = Config(algorithm=AlgorithmSection(advantage_estimator="ppo"))
    with pytest.raises(EnvironmentFault) as caught:
        load_plugins().launch(replace(plan_of(tmp_path), config=config))
    problem_of(caught)


def test_gpus_that_a_cluster_does_not_have_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eight = ParallelSection(resource={"actor": (1, 8), "rollout": (1, 8)}, device="cuda")
    plan = replace(plan_of(tmp_path), config=Config(parallel=eight))
    there = {"CPU": 64.0, "GPU": 7.0}
    monkeypatch.setattr(ray, "cluster_resources", lambda: there)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 64.0})
    with pytest.raises(EnvironmentFault) as caught:
        check_resources(plan)
    assert caught.value.problems[0].id == "ray-gpus"
    there["GPU"] = 8.0
    monkeypatch.setattr(start, "refuse_second_queue", lambda: None)
    check_resources(plan)


def test_a_restart_waits_for_a_node_that_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, said, waited = {"CPU": 1.0}, [], []
    queues = ["of the run that was lost"]

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            free["CPU"] = 64.0
        if len(waited) == 4:
            queues.clear()

    def refuse() -> None:
        if queues:
            raise RunError(Problem("queue-taken", "another run has a queue", "wait", got="a queue"))

    run = check_run(load_plugins(), Layers(["tiny-ppo-cpu"], {}, []))
    assert run.graph is not None
    plan = replace(plan_of(tmp_path), config=run.config, graph=run.graph, patience=600.0, status=said.append)
    monkeypatch.setattr(ray, "cluster_resources", lambda: free)
    monkeypatch.setattr(ray, "available_resources", lambda: free)
    monkeypatch.setattr(start, "refuse_second_queue", refuse)
    monkeypatch.setattr(time, "sleep", wait)
    check_resources(plan)
    assert waited == [1.0] * 4
    assert said[0].startswith("waiting up to 600 s: Ray has too few free logical CPUs")
    assert "another run has a queue" in said[-1]
    free["CPU"] = 1.0
    with pytest.raises(EnvironmentFault, match="too few free logical CPUs"):
        check_resources(replace(plan, patience=0.0))


@pytest.mark.parametrize("address", ["192.0.2.7", "2001:db8::7", "0.0.0.0"])
def test_a_ray_that_others_can_reach_is_refused(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, None)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: address)
    with pytest.raises(EnvironmentFault) as caught:
        start_ray(plan_of(tmp_path))
    (problem,) = caught.value.problems
    assert (problem.id, problem.where) == ("ray-not-local", address)


@pytest.mark.parametrize("given", [None, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "file"])
def test_ray_gets_a_token_where_none_is_given(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    if given == "file":
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("t")
    elif given:
        monkeypatch.setenv(given, "theirs")
    fake(monkeypatch, None)
    start_ray(plan_of(tmp_path))
    made = os.environ.get("RAY_AUTH_TOKEN", "theirs")
    assert (len(made) == 64) == (given is None)


@pytest.mark.parametrize(
    ("said", "fix", "shown"),
    [
        ("AF_UNIX path length cannot exceed 107 bytes: /x", "RAY_TMPDIR=/tmp", "AF_UNIX"),
        ("[Errno 13] Permission denied: '/.ray'", "export HOME and RAY_TMPDIR", "/.ray"),
        ("starting\n[Errno 30] Read-only file system: '/tmp/ray'", "RAY_TMPDIR", "Read-only"),
        ("[Errno 28] No space left on device", "df -h", "No space"),
        ("The configured object store size (10 GB) exceeds /dev/shm", "df -h /dev/shm", "/dev/shm"),
        ("worker was killed due to the node running low on memory", "free memory", "low on memory"),
        ("[Errno 24] Too many open files", "ulimit -n", "Too many"),
        ("Version mismatch: The cluster was started with: Ray: 2.1", "pip install", "Version mismatch"),
    ],
)
@pytest.mark.parametrize("kind", [Exception, RuntimeError])
def test_each_cause_of_a_failed_start_has_its_own_fix(
    said: str, fix: str, shown: str, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, kind(said))
    with pytest.raises(EnvironmentFault) as caught:
        start_ray(plan_of(tmp_path))
    problem = problem_of(caught)
    assert fix in problem.fix
    assert shown in problem.got
    assert "busy" not in problem.fix


@pytest.mark.parametrize(("name", "other"), [("RAY_TMPDIR", "TMPDIR"), ("TMPDIR", "RAY_TMPDIR")])
def test_a_temporary_folder_ray_cannot_use_is_refused(
    name: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(other, raising=False)
    context = RuleContext(Config(parallel=ParallelSection(launcher="ray")))
    local = RuleContext(Config(parallel=ParallelSection(launcher="local")))
    for folder, fine in (("/tmp", True), (f"/tmp/{'x' * 80}", False), (__file__, False)):
        monkeypatch.setenv(name, folder)
        assert list(machine_rules.ray_temp_folder.problems(local)) == []
        found = list(machine_rules.ray_temp_folder.problems(context))
        assert [problem.id for problem in found] == ([] if fine else ["ray-temp-folder"])


@pytest.mark.parametrize("number", [111, 110, 113, 104])
def test_a_refused_connection_is_no_limit_of_processes(number: int) -> None:
    problem = start_failed("10.0.0.7:6379", ConnectionRefusedError(number, "not reachable"))
    assert problem.fix.startswith("ray status --address 10.0.0.7:6379")


def store_of_ray(free: int, wanted: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where Ray's own code puts an object store, given what is free in /dev/shm."""
    monkeypatch.setattr("ray._private.utils.get_shared_memory_bytes", lambda: free)
    monkeypatch.delenv("RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE", raising=False)
    folder: str = determine_plasma_store_config(wanted, "/tmp", plasma_directory=None)[0]
    return folder


GB = 10**9


@pytest.mark.parametrize("recipe", sorted(name for name in bundled_recipes() if "gpu" in name))
def test_ray_takes_the_store_of_every_gpu_recipe(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = check_run(load_plugins(), Layers([recipe], {}, [])).config
    engine = rollout_engine(config)
    assert store_of_ray(64 << 20, object_store_bytes(engine, 48 * GB), monkeypatch) == "/tmp"


@pytest.mark.parametrize(("weights", "free"), [(1 * GB, 0), (2 * GB, 11 * GB), (2 * GB, 12 * GB), (8 * GB, 20 * GB)])
def test_the_rule_refuses_what_ray_refuses(
    weights: int, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(weights)
    config = Config(model=ModelSection(hf_checkpoint=str(tmp_path)), rollout=RolloutSection(rollout_engine="embedded"))
    context = RuleContext(config, machine=replace(UNKNOWN, shared_memory=free))
    found = [problem.id for problem in machine_rules.shared_memory_too_small.problems(context)]
    try:
        store_of_ray(free, object_store_bytes("embedded", weights), monkeypatch)
    except ValueError:
        assert found == ["shared-memory-too-small"]
    else:
        assert found == []
