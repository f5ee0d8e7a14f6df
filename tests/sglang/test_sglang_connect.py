"""Which servers a rollout worker gets, and how it looks at them first."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from relax_cli.backends.rollout.protocol import Request, SamplingParams
from relax_cli.backends.rollout.sglang import connect
from relax_cli.backends.rollout.sglang.client import SglangClient
from relax_cli.backends.rollout.sglang.connect import open_engine
from relax_cli.backends.rollout.sglang.server import NO_CRASH_DUMPS
from relax_cli.backends.rollout.targets import WeightTarget, this_node
from relax_cli.config.schema import ParallelSection, RolloutSection, SglangSection
from relax_cli.errors import EnvironmentFault, RunError
from tests.support.sglang.faults import Faults
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
        assert (first.rollout.rollout_request_timeout, first.rollout.partial_rollout) == (7, True)


@pytest.mark.parametrize(
    ("parallel", "releases"),
    [({"colocate": True}, False), ({"offload_rollout": True}, True), ({"offload": True}, True), ({}, False)],
)
def test_external_servers_give_memory_up_only_when_asked(model: Path, parallel: dict[str, Any], releases: bool) -> None:
    with running_server(model) as (_, address):
        assert attach(model, address, **parallel).release_memory is releases


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
    assert problem.id == "sglang-external-model"
    assert problem.expected.startswith("family llama")
    assert "qwen2" in problem.got


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("num_hidden_layers", 3, "num_layers"),
        ("tie_word_embeddings", None, "tied"),
        ("intermediate_size", 48, "ffn_hidden_size"),
        ("rope_theta", 777.0, "rope_theta"),
        ("rms_norm_eps", 0.5, "rms_eps"),
    ],
)
def test_a_server_whose_model_differs_in_any_key_is_refused(
    model: Path, tmp_path: Path, key: str, value: Any, named: str
) -> None:
    config = json.loads((model / "config.json").read_text())
    changed = not config.get(key, False) if value is None else value
    config.pop("rope_parameters", None)
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps({**config, key: changed}))
    with running_server(model) as (contract, address):
        for contract.folder in (model, Path("/of/an/update/by/disk"), Path("long" * 999)):
            with pytest.raises(EnvironmentFault, match=named) as caught:
                attach(tmp_path, address)
            assert caught.value.problems[0].id == "sglang-external-model"


def test_a_server_that_changes_its_models_config_is_refused(model: Path) -> None:
    told = {"model_path": str(model), "model_type": "qwen2", "json_model_override_args": '{"rope_theta": 5.0}'}
    with answering(200, told) as (address, _), pytest.raises(EnvironmentFault, match="json_model_override_args differ"):
        attach(model, address)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, {"error": "Unauthorized"}, "wants an API key"),
        (403, {"error": "Forbidden"}, "wants an API key"),
        (200, "<html>nginx</html>", "something else listens there"),
        (200, {"tp_size": "two"}, "something else listens there"),
        (200, {"tp_size": 0}, "something else listens there"),
        (404, "<html>not found</html>", "does not answer"),
        (500, {"error": "boom"}, "does not answer"),
    ],
)
def test_what_is_no_open_sglang_server_is_named(
    model: Path, status: int, body: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(status, body) as (address, _), pytest.raises(EnvironmentFault, match=said) as caught:
        attach(model, address)
    (problem,) = caught.value.problems
    assert problem.id == "sglang-external-unreachable"
    assert ("SGLANG_API_KEY" in problem.fix) is (status in (401, 403))


def test_a_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(200, {}) as (address, headers):
        SglangClient(address).request("GET", "/model_info", timeout=10)
        monkeypatch.setenv("SGLANG_API_KEY", "secret")
        SglangClient(address).request("GET", "/model_info", timeout=10)
    assert [head.get("Authorization") for head in headers] == [None, "Bearer secret"]


@pytest.mark.parametrize(
    ("said", "limits"),
    [
        ({"context_length": 32, "max_req_input_len": 26}, (30, 25)),
        ({"context_length": None, "internal_states": [{"max_total_num_tokens": 20}]}, (20, None)),
        ({"context_length": 64, "max_total_num_tokens": 40}, (40, None)),
        ({"context_length": True, "max_req_input_len": "x"}, (None, None)),
        ("text", (None, None)),
    ],
)
def test_limits_are_those_that_the_server_names(said: Any, limits: tuple[int | None, int | None]) -> None:
    with answering(200, said) as (address, _):
        assert connect.limits_of(address) == limits


def test_prompts_are_refused_where_the_server_has_no_room(model: Path) -> None:
    sampling = SamplingParams(max_new_tokens=10, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=())
    with running_server(model, Faults(pool=22)) as (contract, address):
        engine = attach(model, address)
        contract.version = "0"
        (full,) = engine.generate([Request((1,) * 10, 1)], sampling)
        assert len(full.tokens) == 10
        for count, new, said in ((11, 10, "no room for 10 new"), (16, 1, "longer than the server accepts")):
            with pytest.raises(RunError, match=said):
                engine.generate([Request((1,) * count, 2)], replace(sampling, max_new_tokens=new))
        (long,) = engine.generate([Request((1,) * 15, 3)], replace(sampling, max_new_tokens=5))
        assert len(long.tokens) == 5


@contextmanager
def answering(status: int, body: Any) -> Iterator[tuple[str, list[Any]]]:
    """Something that gives one answer to everything; its address, and the headers it got."""
    headers: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers.append(self.headers)
            text = body if isinstance(body, str) and body.startswith("<") else json.dumps(body)
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if text.startswith("<") else "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", headers
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("parallel", "releases"),
    [
        ({"colocate": True, "device": "cuda"}, True),
        ({"device": "cuda"}, False),
        ({"offload_rollout": True, "device": "cuda"}, True),
        ({"colocate": True, "device": "cpu"}, False),
        ({"offload_rollout": True, "device": "cpu"}, False),
    ],
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
        environment={"A": "b", "NO_PROXY": "intra", "PYTORCH_CUDA_ALLOC_CONF": "x"},
    )
    (server,) = started
    assert engine.targets == (WeightTarget(server.address, this_node(), 6, 2),)
    words = " ".join(server._command(1))
    assert "--random-seed 13" in words
    assert ("--enable-memory-saver" in words) is releases
    direct = dict.fromkeys(("no_proxy", "NO_PROXY"), "intra,127.0.0.1")
    assert server._environment == {"A": "b", **NO_CRASH_DUMPS, **direct}
    assert server.log_file == tmp_path / "logs" / "sglang-3.log"
