"""Which servers a rollout worker gets, and how it looks at them first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_cli.backends.rollout.sglang import connect
from relax_cli.backends.rollout.sglang.connect import open_engine
from relax_cli.backends.rollout.targets import WeightTarget, this_node
from relax_cli.config.schema import ParallelSection, RolloutSection, SglangSection
from relax_cli.errors import EnvironmentFault
from tests.support.sglang.server import running_server
from tests.support.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "qwen2")
    return folder


def attach(model: Path, *addresses: str, rank: int = 0, workers: int = 1, **parallel: Any) -> Any:
    """The engine of one worker on running servers."""
    section = SglangSection(rollout_external=True, rollout_external_engine_addrs=addresses)
    return open_engine(
        section,
        RolloutSection(rollout_request_timeout=7, partial_rollout=True),
        ParallelSection(**parallel),
        model_folder=model,
        run_dir=model,
        rank=rank,
        workers=workers,
    )


def test_workers_share_the_servers_out(model: Path) -> None:
    with (
        running_server(model, tp=2) as (_, one),
        running_server(model) as (_, two),
        running_server(model) as (_, three),
    ):
        first = attach(model, one, two, three, rank=0, workers=2)
        assert first.targets == (
            WeightTarget(one, this_node(), None, 2),
            WeightTarget(three, this_node(), None, 1),
        )
        assert [t.address for t in attach(model, one, two, three, rank=1, workers=2).targets] == [two]
        assert (first.options.request_timeout, first.options.partial) == (7, True)


@pytest.mark.parametrize(
    ("parallel", "releases"),
    [({"colocate": True}, False), ({"offload_rollout": True}, True), ({"offload": True}, True), ({}, False)],
)
def test_external_servers_give_memory_up_only_when_asked(model: Path, parallel: dict[str, Any], releases: bool) -> None:
    with running_server(model) as (_, address):
        assert attach(model, address, **parallel).options.release_memory is releases


def test_a_silent_server_is_named_before_generation(model: Path) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        attach(model, "127.0.0.1:9")
    problem = caught.value.problems[0]
    assert (problem.id, problem.where) == ("sglang-external-unreachable", "127.0.0.1:9")
    assert problem.fix == "curl http://127.0.0.1:9/model_info"


def test_a_server_with_another_kind_of_model_is_refused(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with running_server(model) as (_, address), pytest.raises(EnvironmentFault) as caught:
        attach(tmp_path, address)
    problem = caught.value.problems[0]
    assert (problem.id, problem.expected) == ("sglang-external-model", "llama")
    assert "qwen2" in problem.got


@pytest.mark.parametrize(
    ("parallel", "releases"),
    [({"colocate": True}, True), ({}, False), ({"offload_rollout": True}, True)],
)
def test_a_server_of_the_run_is_started_with_the_workers_options(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parallel: dict[str, Any],
    releases: bool,
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(connect.LocalServer, "start", lambda server: started.append(server))
    engine = open_engine(
        SglangSection(rollout_num_gpus_per_engine=2),
        RolloutSection(rollout_seed=10),
        ParallelSection(**parallel),
        model_folder=model,
        run_dir=tmp_path,
        rank=3,
        workers=4,
        environment={"A": "b", "PYTORCH_CUDA_ALLOC_CONF": "x"},
    )
    (server,) = started
    assert engine.targets == (WeightTarget(server.address, this_node(), 6, 2),)
    words = " ".join(server._command(1))
    assert "--random-seed 13" in words
    assert ("--enable-memory-saver --enable-weights-cpu-backup" in words) is releases
    assert server._environment == {"A": "b"}
    assert server.log_file == tmp_path / "logs" / "sglang-3.log"
