"""Rules about SGLang servers: what is refused, and what next to it passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_cli.config import sglang_options
from relax_cli.config.placement import rollout_engine
from relax_cli.config.schema import Config
from relax_cli.config.sglang_options import ServerOption, as_arguments, installed_options
from relax_cli.preflight.rules import RULES
from relax_cli.preflight.rules import sglang as sglang_checks
from tests.support.rules import UNKNOWN, problems_by, problems_of


def config(**sections: dict[str, Any]) -> Config:
    """A configuration with the given sections."""
    return Config.model_validate(sections)


def external(*addresses: str, workers: int = 1, **more: Any) -> Config:
    """Attached to running servers."""
    return config(
        sglang={"rollout_external": True, "rollout_external_engine_addrs": addresses, **more},
        parallel={"resource": {"actor": (1, 1), "rollout": (1, workers)}},
    )


def found(rules: str, given: Config) -> list[str]:
    """Ids of what the rules say whose ids begin like this."""
    asked = [rule for rule in RULES if rule.kind.id.startswith(rules)]
    return [problem.id for rule in asked for problem in problems_by(rule, given)]


@pytest.mark.parametrize(
    ("engine", "device", "attached", "expected"),
    [
        ("auto", "cpu", False, "embedded"),
        ("auto", "auto", False, "embedded"),
        ("auto", "cuda", False, "sglang"),
        ("auto", "cpu", True, "sglang"),
        ("embedded", "cuda", False, "embedded"),
        ("sglang", "cpu", False, "sglang"),
    ],
)
def test_the_engine_follows_device_and_servers_unless_named(
    engine: str, device: str, attached: bool, expected: str
) -> None:
    given = config(
        rollout={"rollout_engine": engine}, parallel={"device": device}, sglang={"rollout_external": attached}
    )
    assert rollout_engine(given) == expected


def test_external_and_addresses_need_each_other() -> None:
    rule = "sglang-external-addresses"
    assert found(rule, external()) == ["sglang-external-addresses"]
    assert found(rule, config(sglang={"rollout_external_engine_addrs": ("a:1",)})) == ["sglang-external-addresses"]
    assert found(rule, external("a:1", "b:1")) == []
    assert found(rule, config()) == []


@pytest.mark.parametrize("address", ["10.0.0.1", "http://a:1", "a:0", "a:65536", "a:x", ":30000", "::1:30000", "a b:1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    assert found("sglang-address", external(address)) == ["sglang-address"]


@pytest.mark.parametrize("address", ["10.0.0.1:30000", "node-3.local:1", "[::1]:30000", "localhost:65535"])
def test_addresses_are_host_and_port(address: str) -> None:
    assert found("sglang-address", external(address)) == []


def test_a_server_is_named_once() -> None:
    assert found("sglang-address", external("a:1", "b:1", "a:1")) == ["sglang-address-twice"]
    assert found("sglang-address", external("a:1", "a:2")) == []
    assert found("sglang-address", external("localhost:30000", "127.0.0.1:30000")) == ["sglang-address-twice"]
    assert found("sglang-address", external("Node:80", "node:080")) == ["sglang-address-twice"]


def test_every_rollout_worker_has_a_server() -> None:
    assert found("sglang-external-workers", external("a:1", workers=2)) == ["sglang-external-workers"]
    assert found("sglang-external-workers", external("a:1", "b:1", "c:1", workers=2)) == []


def test_the_embedded_engine_is_no_server() -> None:
    rule = "sglang-external-embedded"
    given = external("a:1")
    assert found(rule, given) == []
    embedded = given.rollout.model_copy(update={"rollout_engine": "embedded"})
    assert found(rule, given.model_copy(update={"rollout": embedded})) == ["sglang-external-embedded"]


def test_options_of_servers_that_run_already_are_reported() -> None:
    rule = "sglang-external-options"
    assert found(rule, external("a:1", sglang_options={"log_level": "error"})) == ["sglang-external-options"]
    assert found(rule, external("a:1", sglang_mem_fraction_static=0.5)) == ["sglang-external-options"]
    assert found(rule, external("a:1", sglang_server_concurrency=7)) == []
    assert found(rule, config(sglang={"sglang_mem_fraction_static": 0.5})) == []


@pytest.mark.parametrize(("gpus", "size", "ids"), [(8, 2, []), (8, 8, []), (8, 3, ["sglang-gpus-per-engine"])])
def test_gpus_are_shared_out_evenly_over_servers(gpus: int, size: int, ids: list[str]) -> None:
    given = config(
        sglang={"rollout_num_gpus_per_engine": size},
        parallel={"resource": {"actor": (1, gpus), "rollout": (1, gpus)}},
    )
    assert found("sglang-gpus", given) == ids


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, str]]]:
    """Ids and fixes of what is said of server options."""

    def ask(given: dict[str, Any], names: set[str] | None) -> list[tuple[str, str]]:
        installed = None if names is None else dict.fromkeys(names, ServerOption())
        monkeypatch.setattr(sglang_checks, "installed_options", lambda python: installed)
        problems = problems_of(config(sglang={"sglang_options": given}), skip_files=True)
        return [(p.id, p.fix) for p in problems if p.id.startswith("sglang-option-")]

    return ask


Ask = Callable[..., list[tuple[str, str]]]


def test_options_that_the_run_sets_are_refused_with_the_reason(options: Ask) -> None:
    ((rule, fix),) = options({"tp_size": "2"}, {"tp_size"})
    assert rule == "sglang-option-reserved"
    assert "--rollout-num-gpus-per-engine" in fix
    assert options({"attention_backend": "triton"}, {"attention_backend"}) == []


@pytest.mark.parametrize(
    "name",
    ["delete_ckpt_after_loading", "config", "nnodes", "ssl_keyfile", "smg_grpc_mode", "json_model_override_args"],
)
def test_options_that_hang_a_run_or_cost_its_model_are_refused(options: Ask, name: str) -> None:
    ((rule, fix),) = options({name: "1"}, {name})
    assert (rule, fix.partition(":")[0]) == ("sglang-option-reserved", f"drop --sglang-{name.replace('_', '-')}")


def test_options_the_installed_sglang_lacks_are_refused(options: Ask) -> None:
    assert options({"atention_backend": "triton"}, {"attention_backend", "log_level"}) == [
        ("sglang-option-unknown", "use --sglang-attention-backend")
    ]
    assert options({"mem_fraction_statc": "1"}, {"log_level"}) == [
        ("sglang-option-unknown", "use --sglang-mem-fraction-static")
    ]
    assert options({"zzz": "1"}, {"log_level"}) == [("sglang-option-unknown", "drop --sglang-zzz")]


def test_without_sglang_only_our_misspelt_options_are_refused(options: Ask) -> None:
    assert options({"server_concurency": "1"}, None) == [("sglang-option-unknown", "use --sglang-server-concurrency")]
    assert options({"attention_backend": "triton"}, None) == []


def test_servers_are_started_only_where_sglang_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, wanted = "sglang-missing", config(rollout={"rollout_engine": "sglang"})
    monkeypatch.setattr(sglang_checks, "installed_options", lambda python: None)
    assert found(rule, wanted) == ["sglang-missing"]
    assert found(rule, external("a:1")) == []
    assert found(rule, config()) == []
    monkeypatch.setattr(sglang_checks, "installed_options", lambda python: {"port": ServerOption()})
    assert found(rule, wanted) == []


@pytest.mark.parametrize(
    ("gpus", "given", "ids"),
    [
        (0, {}, ["sglang-no-gpu"]),
        (1, {}, []),
        (0, {"sglang": {"sglang_options": {"device": "cpu"}}}, []),
        (0, {"sglang": {"rollout_external": True}}, []),
        (0, {"rollout": {"rollout_engine": "auto"}}, []),
    ],
)
def test_servers_start_on_a_cpu_only_on_request(gpus: int, given: dict[str, Any], ids: list[str]) -> None:
    rule = next(rule for rule in RULES if rule.kind.id == "sglang-no-gpu")
    wanted = {"rollout": {"rollout_engine": "sglang"}, "parallel": {"device": "cpu"}} | given
    assert [p.id for p in problems_by(rule, config(**wanted), machine=replace(UNKNOWN, gpus=gpus))] == ids


def test_servers_may_be_started_from_another_environment(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    given = {"rollout": {"rollout_engine": "sglang"}, "sglang": {"sglang_python": str(python)}}
    assert found("sglang-missing", config(**given)) == ["sglang-missing"]
    source = tmp_path / "lib" / "python3.12" / "site-packages" / "sglang" / "srt" / "server_args.py"
    source.parent.mkdir(parents=True)
    source.write_text("class ServerArgs:\n    port: int = 1\n")
    sglang_options.installed_options.cache_clear()
    assert found("sglang-missing", config(**given)) == []
    assert found("sglang-python", config(**given)) == []


def test_the_interpreter_of_servers_is_an_absolute_path() -> None:
    rule = "sglang-python"
    assert found(rule, config(sglang={"sglang_python": "sgl/bin/python"})) == ["sglang-python-relative"]
    assert found(rule, config(sglang={"sglang_python": "/opt/sgl/bin/python"})) == []


def test_the_embedded_engine_beside_gpus_is_reported() -> None:
    rule = "embedded-engine-on"
    given = {"rollout": {"rollout_engine": "embedded"}}
    assert found(rule, config(**given, parallel={"device": "cuda"})) == ["embedded-engine-on-cuda"]
    assert found(rule, config(**given)) == []


def test_greedy_log_probs_need_temperature_one() -> None:
    rule = "sglang-greedy"
    greedy = {"rollout_engine": "sglang", "rollout_top_k": 1}
    assert found(rule, config(rollout={**greedy, "rollout_temperature": 0.5})) == ["sglang-greedy-temperature"]
    assert found(rule, config(rollout={**greedy, "rollout_temperature": 1.0})) == []
    assert (
        found(rule, config(rollout={"rollout_engine": "embedded", "rollout_top_k": 1, "rollout_temperature": 0.5}))
        == []
    )


def test_stop_strings_exclude_continuing() -> None:
    rule = "partial-rollout"
    assert found(rule, config(rollout={"partial_rollout": True, "rollout_stop": ("x",)})) == ["partial-rollout-stop"]
    assert found(rule, config(rollout={"partial_rollout": True})) == []


def test_options_become_arguments() -> None:
    given = {"attention_backend": "triton", "a_flag": True, "not_this": False, "nor_this": None, "sizes": [1, "2"]}
    assert as_arguments(given) == ["--attention-backend", "triton", "--a-flag", "--sizes", "1", "2"]
    assert as_arguments({"override": {"a": 1}}) == ["--override", '{"a": 1}']


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed sglang with sources in the form of 0.5.22 and 0.5.23; nothing of it can be imported."""
    fields = tmp_path / "sglang" / "srt" / "arg_groups" / "fields"
    fields.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("raise ImportError('no GPU')")
    (fields / "parallel.py").write_text(
        "class Parallel:\n"
        "    tp_size: A[int, Arg(help='x', aliases=['--tensor-parallel-size'])] = 1\n"
        "    hidden: A[int, Arg(no_cli=True)] = 1\n"
        "    quiet: A[bool, 'x'] = False\n"
        "    rate: A[Optional[float], 'x'] = None\n"
        "    mode: A[str, Arg(choices=['auto', 'slow'])] = 'auto'\n"
        "    level: A[Literal[1, 2], 'x'] = 1\n"
        "    backend: A[Optional[str], Arg(choices=BACKENDS)] = None\n"
        "    length: A[int, Arg(type_parser=human_readable_int)] = 1\n"
        "    path: A[Optional[str], 'x'] = None\n"
    )
    (fields.parent / "choices.py").write_text("BACKENDS = ['triton', 'fa3']\n")
    (fields.parent.parent / "server_args.py").write_text("class ServerArgs:\n    port: int = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sglang_options.installed_options.cache_clear()
    yield tmp_path
    sglang_options.installed_options.cache_clear()


def test_installed_options_are_read_without_an_import(package: Path) -> None:
    assert installed_options() == {
        "tp_size": ServerOption("int"),
        "tensor_parallel_size": ServerOption(),
        "port": ServerOption(),
        "quiet": ServerOption("bool"),
        "rate": ServerOption("float"),
        "mode": ServerOption("str", ("auto", "slow")),
        "level": ServerOption("str", ("1", "2")),
        "backend": ServerOption("str", ("triton", "fa3"), is_open=True),
        "length": ServerOption(),
        "path": ServerOption("str"),
    }


@pytest.mark.parametrize(
    ("given", "fix", "expected"),
    [
        ({"quiet": "true"}, "--sglang-quiet", "no value: the option turns it on"),
        ({"quiet": "false"}, "drop --sglang-quiet false", "no value: the option turns it on"),
        ({"rate": "1,5"}, "drop --sglang-rate 1,5", "a number"),
        ({"rate": True}, "drop --sglang-rate", "one value"),
        ({"path": ["a", "b"]}, "drop --sglang-path a b", "one value"),
        ({"mode": "fast"}, "drop --sglang-mode fast", "auto, slow"),
        ({"mode": "slwo"}, "--sglang-mode slow", "auto, slow"),
        ({"level": 3}, "drop --sglang-level 3", "1, 2"),
        ({"backend": "tritn"}, "--sglang-backend triton", "triton, fa3"),
    ],
)
def test_values_the_server_would_refuse_are_refused(
    given: dict[str, Any], fix: str, expected: str, package: Path
) -> None:
    problems = problems_of(config(sglang={"sglang_options": given}), skip_files=True)
    about = [(p.fix, p.expected) for p in problems if p.id == "sglang-option-value"]
    assert about == [(fix, expected)]


def test_values_the_server_may_take_are_left_to_it(package: Path) -> None:
    given = {"quiet": True, "rate": "1e-1", "mode": "slow", "level": 2, "backend": "mine", "length": "4k", "path": "x"}
    for options in (given, {"quiet": False, "mode": None}):
        problems = problems_of(config(sglang={"sglang_options": options}), skip_files=True)
        assert "sglang-option-value" not in [p.id for p in problems]


def test_a_folder_of_that_name_is_no_package(package: Path) -> None:
    (package / "sglang" / "__init__.py").unlink()
    sglang_options.installed_options.cache_clear()
    assert installed_options() is None
