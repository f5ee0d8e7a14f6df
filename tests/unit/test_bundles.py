"""Arithmetic of bundles, workers and servers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from relax_cli.config.placement import needed_cpus, processes_of, shared_bundles, takes_bundles
from relax_cli.config.schema import Config, ParallelSection, RolloutSection, SglangSection
from relax_cli.engine import build
from relax_cli.engine.ray.launch import Place, RaySession, build_order, in_order, server_places
from relax_cli.errors import EnvironmentFault
from relax_cli.plugin.launch_plan import LaunchPlan

EIGHT = ParallelSection(
    resource={"actor": (1, 8), "critic": (1, 8), "rollout": (1, 8), "advantages": (1, 0)}, device="cuda"
)
SAMPLED = RolloutSection()
PAIRS = SglangSection(rollout_num_gpus_per_engine=2)
EXTERNAL = SglangSection(rollout_external=True, rollout_external_engine_addrs=("a:1", "b:1"))


@pytest.mark.parametrize(
    ("role", "rollout", "sglang", "device", "processes"),
    [
        ("rollout", SAMPLED, PAIRS, "cuda", 4),
        ("actor", SAMPLED, PAIRS, "cuda", 8),
        ("advantages", SAMPLED, PAIRS, "cuda", 1),
        ("rollout", SAMPLED, PAIRS, "cpu", 8),  # the embedded engine
        ("rollout", RolloutSection(rollout_engine="sglang"), PAIRS, "cpu", 4),
        ("rollout", SAMPLED, EXTERNAL, "cuda", 8),
    ],
)
def test_rollout_has_a_worker_for_each_server(
    role: str, rollout: RolloutSection, sglang: SglangSection, device: str, processes: int
) -> None:
    parallel = EIGHT.model_copy(update={"device": device})
    assert processes_of(role, Config(parallel=parallel, rollout=rollout, sglang=sglang)) == processes


def test_workers_of_external_servers_take_no_bundle() -> None:
    wide = EIGHT.model_copy(update={"resource": {"actor": (1, 2), "rollout": (1, 8)}})
    assert shared_bundles(wide, PAIRS) == 8
    assert shared_bundles(wide, EXTERNAL) == 2
    assert needed_cpus(wide, EXTERNAL) == 2 + 1 + 2
    assert not takes_bundles("rollout", wide, EXTERNAL)
    assert takes_bundles("actor", wide, EXTERNAL)
    assert not takes_bundles("advantages", EIGHT, PAIRS)


def test_ranks_go_machine_by_machine_and_gpus_ascend() -> None:
    places = [Place(0, "b", "1"), Place(1, "a", "10"), Place(2, "a", "2"), Place(3, "b", "0"), Place(4, "a", "0")]
    assert [place.bundle for place in in_order(places)] == [4, 2, 1, 3, 0]


def test_bundles_that_nobody_asked_about_stay_in_their_order() -> None:
    places = [Place(i) for i in range(12)]
    assert in_order(places) == places


def test_a_server_has_the_bundles_of_the_ranks_with_its_numbers() -> None:
    places = [Place(i, "a" if i < 4 else "b", str(i % 4)) for i in range(8)]
    groups = server_places(places, 2, 4)
    assert [[place.bundle for place in group] for group in groups] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [group[0].node for group in groups] == ["a", "a", "b", "b"]


def test_a_server_on_two_machines_is_refused() -> None:
    places = [Place(i, "a" if i < 3 else "b", str(i)) for i in range(6)]
    with pytest.raises(EnvironmentFault, match="SGLang server 1 are on 2 machines") as caught:
        server_places(places, 2, 3)
    problem = caught.value.problems[0]
    assert (problem.id, problem.got) == ("server-spans-nodes", "a: 3 GPUs, b: 3 GPUs")
    assert server_places(places, 3, 2)


def test_on_gpus_servers_start_when_the_models_sleep() -> None:
    roles = ["rollout", "critic", "advantages", "actor"]
    assert build_order(roles, in_turns=False) == [roles]
    assert build_order(roles, in_turns=True) == [["critic"], ["advantages"], ["actor"], ["rollout"]]


def launched(role: str, sglang: SglangSection, rollout: RolloutSection = SAMPLED) -> list[tuple[int | None, str]]:
    """Bundle and GPUs of the role's workers, on two machines with four GPUs each."""
    places = in_order([Place(7 - i, "a" if i < 4 else "b", str(i % 4)) for i in range(8)])
    config = Config(parallel=EIGHT, sglang=sglang, rollout=rollout)
    nothing: Any = None
    plan = LaunchPlan(
        config=config,
        graph=nothing,
        model_folder=Path("model"),
        run_dir=Path("run"),
        actor_load=None,
        critic_load=None,
        status=print,
    )
    session: Any = SimpleNamespace(places=places)
    return [(spec.bundle, ",".join(spec.gpus)) for spec in RaySession._placed(session, plan, role)]


def test_a_worker_is_told_the_gpus_of_its_server() -> None:
    assert launched("rollout", PAIRS) == [(7, "0,1"), (5, "2,3"), (3, "0,1"), (1, "2,3")]
    assert launched("actor", PAIRS) == [(7 - i, str(i % 4)) for i in range(8)]
    assert launched("advantages", PAIRS) == [(None, "")]
    assert launched("rollout", EXTERNAL) == [(None, "")] * 8
    with pytest.raises(EnvironmentFault, match="on 2 machines"):
        launched("rollout", SglangSection(rollout_num_gpus_per_engine=8))


def test_the_embedded_engine_takes_one_bundle_per_rank() -> None:
    assert len(launched("rollout", PAIRS, RolloutSection(rollout_engine="embedded"))) == 8


@pytest.mark.parametrize(
    ("torch_version", "users", "setting"),
    [
        ("2.13.0+cpu", {}, "pinned_max_cached_size_mb:1"),
        ("2.14.1", {}, "pinned_max_cached_size_mb:1"),
        ("2.12.1", {}, None),
        ("2.14.1", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
        ("2.14.1", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_parked_roles_take_their_size_in_host_memory(
    torch_version: str, users: dict[str, str], setting: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(build, "version", lambda _: torch_version)
    assert build.cpu_environment(2).get("PYTORCH_ALLOC_CONF") == setting
    # The option exists: torch accepts any name.
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    assert b"pinned_max_cached_size_mb" in library.read_bytes()
