"""The engine against a server that speaks SGLang's protocol: equal to the embedded engine, whatever goes wrong."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_cli.backends.rollout.embedded.engine import EmbeddedEngine
from relax_cli.backends.rollout.protocol import Decode, Generation, Opening, Request, SamplingParams
from relax_cli.backends.rollout.sglang import engine as engine_module
from relax_cli.backends.rollout.sglang.client import ConnectionFault, DeadlineFault, SglangClient, StatusFault
from relax_cli.backends.rollout.sglang.engine import SglangEngine
from relax_cli.backends.rollout.targets import WeightTarget
from relax_cli.config.schema import RolloutSection
from relax_cli.errors import RunError
from tests.support.conversations import converse, known
from tests.support.sglang.faults import Fault, Faults, Kind
from tests.support.sglang.server import SAMPLING_KEYS, ContractServer, running_server
from tests.support.tiny_models import VOCAB, save_tiny_model

POSITIONS = 128
SAMPLING = SamplingParams(max_new_tokens=10, temperature=0.9, top_p=0.95, top_k=40, stop_token_ids=(3, 4, 5, 6, 7, 8))
SEEDS = itertools.count(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "qwen3")
    return folder


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[tuple[ContractServer, str]]:
    """One server for the tests that leave it alive."""
    with running_server(model) as (contract, address):
        contract.version = "0"
        yield contract, address


@pytest.fixture
def server(served: tuple[ContractServer, str]) -> Iterator[ContractServer]:
    """The server without faults."""
    contract, _ = served
    contract.faults = Faults()
    contract.requests.clear()
    yield contract
    assert not contract.dead
    deadline = time.monotonic() + 60
    while contract.running and time.monotonic() < deadline:
        time.sleep(0.01)  # what was aborted last may still be leaving
    assert contract.running == {}


@pytest.fixture(scope="module")
def embedded(model: Path) -> EmbeddedEngine:
    """What every response is compared with."""
    return EmbeddedEngine(model, decode=None)


def engine_for(
    *addresses: str,
    partial: bool = False,
    concurrency: int = 16,
    timeout: float = 60.0,
    decode: Decode | None = None,
) -> SglangEngine:
    """An engine that repeats without waiting long."""
    more: Any = {"rollout": RolloutSection(rollout_request_timeout=timeout, partial_rollout=partial), "backoff": 0.001}
    targets = [WeightTarget(address, "here", None, 1) for address in addresses]
    limits = {"vocab_size": VOCAB, "max_positions": POSITIONS, "concurrency": concurrency}
    return SglangEngine(targets, **limits, **more, decode=decode)


def some_requests(count: int) -> list[Request]:
    """Prompts of several lengths, some of them equal, with seeds that no other test uses."""
    return [Request(tuple((i // 2 * 7 + j) % VOCAB for j in range(2 + i // 2 % 5)), next(SEEDS)) for i in range(count)]


def assert_equal(got: list[Generation], expected: list[Generation]) -> None:
    """The same tokens and reasons in the same order, log-probabilities to 1e-4."""
    assert [(g.tokens, g.finish_reason) for g in got] == [(e.tokens, e.finish_reason) for e in expected]
    for one, other in zip(got, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def generated(server: ContractServer) -> list[dict]:
    """Bodies of all `/generate` requests."""
    return [body for path, body in server.requests if path == "/generate"]


def test_responses_are_those_of_the_embedded_engine(
    server: ContractServer, served: tuple[ContractServer, str], embedded: EmbeddedEngine
) -> None:
    requests = some_requests(24)
    expected = embedded.generate(requests, SAMPLING)
    assert {"stop", "length"} == {e.finish_reason for e in expected}
    told: dict[int, Generation] = {}
    found = engine_for(served[1]).generate(requests, SAMPLING, told.__setitem__)
    assert_equal(found, expected)
    assert all(told[place] is found[place] for place in range(24))
    assert all(e.tokens[-1] in SAMPLING.stop_token_ids for e in expected if e.finish_reason == "stop")


def test_one_request_a_sample_says_what_the_server_needs(
    server: ContractServer, served: tuple[ContractServer, str]
) -> None:
    requests = some_requests(6)
    engine = engine_for(served[1])
    engine.generate(requests, SAMPLING)
    engine.generate(requests, SAMPLING)
    bodies = generated(server)
    assert len({body["rid"] for body in bodies}) == 12
    assert sorted(b["input_ids"] for b in bodies) == sorted([list(r.prompt_tokens) for r in requests] * 2)
    assert all(b["return_logprob"] is True for b in bodies)
    (params,) = {str({k: v for k, v in b["sampling_params"].items() if k != "sampling_seed"}) for b in bodies}
    assert "'temperature': 0.9" in params
    assert set(bodies[0]["sampling_params"]) <= SAMPLING_KEYS
    assert {b["sampling_params"]["sampling_seed"] for b in bodies} == {r.seed for r in requests}


def test_settings_of_a_server_are_not_those_of_a_request(
    server: ContractServer, served: tuple[ContractServer, str]
) -> None:
    engine_for(served[1]).generate(some_requests(1), SAMPLING)
    (body,) = generated(server)
    left_out = SAMPLING_KEYS - body["sampling_params"].keys()
    assert left_out == {
        "spaces_between_special_tokens",
        "stream_interval",
        "custom_params",
        "beam_width",
        "watermark",
        "choice",
    }


def test_a_stop_string_that_a_server_overlooks_ends_a_response(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(tokens: list[int]) -> str:
        return "".join("abcd"[token % 4] for token in tokens)

    requests, sampling = some_requests(24), replace(SAMPLING, stop=("ab", "cc"))
    with running_server(model) as (contract, address):
        contract.version = "0"
        submit = contract.model.submit
        monkeypatch.setattr(contract.model, "submit", lambda tokens, said: submit(tokens, {**said, "stop": []}))
        engine = engine_for(address, decode=decode)
        got = engine.generate(requests, sampling)
        assert any(g.finish_reason == "stop" and g.tokens[-1] not in SAMPLING.stop_token_ids for g in got)
    assert_equal(got, EmbeddedEngine(model, decode=decode).generate(requests, sampling))


def test_several_servers_share_the_requests(model: Path, embedded: EmbeddedEngine) -> None:
    requests = some_requests(9)
    with running_server(model) as (one, first), running_server(model) as (two, second):
        one.version = two.version = "0"
        got = engine_for(first, second).generate(requests, SAMPLING)
        assert (len(generated(one)), len(generated(two))) == (5, 4)
    assert_equal(got, embedded.generate(requests, SAMPLING))


def test_conversations_are_those_of_the_embedded_engine(model: Path, embedded: EmbeddedEngine) -> None:
    openings = some_requests(8)
    with running_server(model) as (one, first), running_server(model) as (two, second):
        one.version = two.version = "0"
        done = converse(engine_for(first, second, concurrency=2), openings, SAMPLING, turns=3)
        bodies = [generated(one), generated(two)]
    for requests, generations in (zip(*turns, strict=True) for turns in done):
        assert_equal(list(generations), embedded.generate(requests, SAMPLING))
    # A conversation stays where the cache of its prompt is, and no id comes twice.
    ids = [[body["rid"].split("-") for body in half] for half in bodies]
    assert [{int(rid[3]) % 2 for rid in half} for half in ids] == [{0}, {1}]
    assert len({tuple(rid) for half in ids for rid in half}) == 28


def test_a_failed_answer_ends_all_conversations(server: ContractServer, served: tuple[ContractServer, str]) -> None:
    openings = [known(request) for request in some_requests(4)]
    failed: Opening = Future()
    failed.set_exception(RuntimeError("no answer"))
    with pytest.raises(RuntimeError, match="no answer"):
        engine_for(served[1]).converse(openings, SAMPLING, lambda i, _: failed if i == 2 else Future())


def test_concurrency_is_bounded(server: ContractServer, served: tuple[ContractServer, str]) -> None:
    server.faults.order([Fault("slow", seconds=0.1)] * 8)
    most = 0
    watching = threading.Event()

    def watch() -> None:
        nonlocal most
        while not watching.wait(0.005):
            most = max(most, len(server.running))

    thread = threading.Thread(target=watch)
    thread.start()
    engine_for(served[1], concurrency=3).generate(some_requests(8), SAMPLING)
    watching.set()
    thread.join()
    assert 1 < most <= 3


@pytest.mark.parametrize("kind", ["disconnect", "cut"])
def test_a_broken_connection_is_repeated_under_a_new_id(
    server: ContractServer,
    served: tuple[ContractServer, str],
    embedded: EmbeddedEngine,
    kind: Kind,
    caplog: pytest.LogCaptureFixture,
) -> None:
    requests = some_requests(5)
    # On a busy machine one request may meet all of them.
    faults = engine_module.CONNECTION_TRIES - 1
    server.faults.order([Fault(kind)] * faults)
    assert_equal(engine_for(served[1]).generate(requests, SAMPLING), embedded.generate(requests, SAMPLING))
    bodies = generated(server)
    assert len(bodies) == 5 + faults
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.endswith(f"of {faults} requests of this rollout; they were repeated")
    assert len({body["rid"] for body in bodies}) == 5 + faults
    # The lost ones are not left running.
    assert len([path for path, _ in server.requests if path == "/abort_request"]) == faults


def test_connections_that_keep_breaking_end_the_call(
    server: ContractServer, served: tuple[ContractServer, str]
) -> None:
    server.faults.order([Fault("disconnect")] * 50)
    with pytest.raises(ConnectionFault):
        engine_for(served[1]).generate(some_requests(2), SAMPLING)
    assert len(generated(server)) <= 2 * engine_module.CONNECTION_TRIES


def test_nobody_listens() -> None:
    with pytest.raises(ConnectionFault, match=r"127\.0\.0\.1:9"):
        engine_for("127.0.0.1:9").generate(some_requests(1), SAMPLING)


@pytest.mark.parametrize("kind", ["error_message", "error_string", "error_object"])
@pytest.mark.parametrize("status", [400, 500, 503])
def test_a_server_error_is_shown_verbatim_and_not_retried(
    server: ContractServer, served: tuple[ContractServer, str], kind: Kind, status: int
) -> None:
    server.faults.order([Fault(kind, status=status)])
    with pytest.raises(StatusFault) as caught:
        engine_for(served[1]).generate(some_requests(1), SAMPLING)
    assert (caught.value.status, caught.value.problems[0].got) == (status, "the request is bad")
    assert len(generated(server)) == 1


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("stale", "sglang-stale-weights"),
        ("mixed", "sglang-stale-weights"),
        ("missing_log_prob", "sglang-reply"),
        ("null_log_prob", "sglang-reply"),
        ("positive_log_prob", "sglang-reply"),
        ("long_log_prob", "sglang-reply"),
        ("not_a_number", "sglang-reply"),
        ("other_prompt", "sglang-reply"),
        ("past_stop", "sglang-reply"),
        ("other_tokens", "sglang-reply"),
        ("foreign_token", "sglang-reply"),
        ("empty", "sglang-reply"),
        ("too_long", "sglang-reply"),
        ("no_reason", "sglang-reply"),
        ("not_json", "sglang-request"),
    ],
)
def test_a_reply_in_doubt_is_refused(
    server: ContractServer, served: tuple[ContractServer, str], kind: Kind, rule: str
) -> None:
    server.faults.order([Fault(kind)])
    with pytest.raises(RunError) as caught:
        engine_for(served[1]).generate(some_requests(1), SAMPLING)
    assert caught.value.problems[0].id == rule
    assert len(generated(server)) == 1


def test_an_aborted_response_is_asked_for_again_from_the_prompt(
    server: ContractServer, served: tuple[ContractServer, str], embedded: EmbeddedEngine
) -> None:
    requests = some_requests(3)
    server.faults.order([Fault("abort", tokens=2)] * 4)
    assert_equal(engine_for(served[1]).generate(requests, SAMPLING), embedded.generate(requests, SAMPLING))
    assert {len(body["input_ids"]) for body in generated(server)} == {len(r.prompt_tokens) for r in requests}


def test_partial_rollout_continues_an_aborted_response(
    server: ContractServer, served: tuple[ContractServer, str], embedded: EmbeddedEngine
) -> None:
    endless = SamplingParams(max_new_tokens=10, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=())
    (request,) = some_requests(1)
    server.faults.order([Fault("abort", tokens=3), Fault("abort", tokens=0), Fault("abort", tokens=4)])
    got = engine_for(served[1], partial=True).generate([request], endless)
    (expected,) = embedded.generate([request], endless)
    assert_equal(got, [expected])
    prompt = list(request.prompt_tokens)
    asked = [(b["input_ids"], b["sampling_params"]["max_new_tokens"]) for b in generated(server)]
    kept = (0, 3, 3, 7)
    assert asked == [(prompt + expected.tokens[:n], 10 - n) for n in kept]


def test_a_response_in_parts_is_that_in_one(served: tuple[ContractServer, str], embedded: EmbeddedEngine) -> None:
    endless = SamplingParams(max_new_tokens=10, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=())
    requests, engine = some_requests(3), engine_for(served[1])
    begun = engine.generate([replace(request, most_tokens=4) for request in requests], endless)
    assert {part.finish_reason for part in begun} == {"length"}
    rest = engine.generate(
        [
            replace(request, prompt_tokens=(*request.prompt_tokens, *part.tokens), sampled=4, most_tokens=6)
            for request, part in zip(requests, begun, strict=True)
        ],
        endless,
    )
    whole = [
        Generation(a.tokens + b.tokens, a.log_probs + b.log_probs, "length") for a, b in zip(begun, rest, strict=True)
    ]
    assert_equal(whole, embedded.generate(requests, endless))


def test_partial_tokens_of_other_weights_are_not_continued(
    server: ContractServer, served: tuple[ContractServer, str]
) -> None:
    server.faults.order([Fault("abort", tokens=3)])
    engine = engine_for(served[1], partial=True)
    engine.weight_version = "7"
    with pytest.raises(RunError) as caught:
        engine.generate(some_requests(1), SAMPLING)
    assert caught.value.problems[0].id == "sglang-stale-weights"


def test_a_server_that_always_aborts_is_an_error_with_the_sample(
    server: ContractServer, served: tuple[ContractServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "ABORT_TRIES", 3)
    server.faults.order([Fault("abort", tokens=1)] * 9)
    with pytest.raises(RunError, match="aborted sample 0 of 1 3 times") as caught:
        engine_for(served[1]).generate(some_requests(1), SAMPLING)
    assert caught.value.problems[0].id == "sglang-aborted"


def test_after_the_deadline_a_request_is_aborted(server: ContractServer, served: tuple[ContractServer, str]) -> None:
    server.faults.order([Fault("slow", seconds=60)] * 2)
    started = time.monotonic()
    with pytest.raises(DeadlineFault):
        engine_for(served[1], timeout=1.0).generate(some_requests(2), SAMPLING)
    assert time.monotonic() - started < 30
    aborted = {body["rid"] for path, body in server.requests if path == "/abort_request"}
    assert aborted == {body["rid"] for body in generated(server)}
    while server.running:
        time.sleep(0.01)


def test_one_failure_ends_the_other_requests_at_once(
    server: ContractServer, served: tuple[ContractServer, str]
) -> None:
    server.faults.order([Fault("slow", seconds=60)] * 3 + [Fault("error_string")])
    started = time.monotonic()
    with pytest.raises(StatusFault):
        engine_for(served[1]).generate(some_requests(4), SAMPLING)
    assert time.monotonic() - started < 30
    while server.running:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("prompt", "message"), [((), "no tokens"), ((1, VOCAB), "outside"), ((-1,), "outside"), ((1,) * 125, "no room")]
)
def test_prompts_that_would_kill_the_server_are_not_sent(
    server: ContractServer, served: tuple[ContractServer, str], prompt: tuple[int, ...], message: str
) -> None:
    with pytest.raises(RunError, match=message):
        engine_for(served[1]).generate([Request((1,), 1), Request(prompt, 1)], SAMPLING)
    assert generated(server) == []


def test_a_crash_during_generation_ends_the_call(model: Path) -> None:
    with running_server(model, Faults(generate=[Fault("crash")])) as (contract, address):
        contract.version = "0"
        with pytest.raises(ConnectionFault):
            engine_for(address).generate(some_requests(4), SAMPLING)
        assert contract.dead


def sleeping(address: str) -> SglangEngine:
    """An engine whose servers give up memory."""
    engine = engine_for(address)
    engine.release_memory = True
    engine.sleep()
    return engine


def publish(contract: ContractServer, engine: SglangEngine) -> None:
    """What the actor does for a sleeping server, with the weights of its model folder."""
    engine.wake_for_weights()
    contract.model.replace(contract.folder)
    contract.model.apply()
    engine.weights_updated(0)


def test_sleep_waits_for_idle_servers_and_wakes_in_two_stages(model: Path, embedded: EmbeddedEngine) -> None:
    requests = some_requests(2)
    with running_server(model, Faults(busy_flushes=3), backup=False) as (contract, address):
        contract.version = "0"
        engine = sleeping(address)
        assert contract.away == {"kv_cache", "weights"}
        engine.sleep()
        with pytest.raises(AssertionError, match="sleeps"):
            engine.generate(requests, SAMPLING)
        engine.wake_for_weights()
        assert contract.away == {"kv_cache"}
        engine.sleep()
        assert contract.away == {"kv_cache", "weights"}
        publish(contract, engine)
        engine.wake()
        engine.wake()
        assert contract.away == set()
        assert_equal(engine.generate(requests, SAMPLING), embedded.generate(requests, SAMPLING))
        assert not contract.dead


def test_weights_given_up_with_the_memory_are_not_generated_with(model: Path) -> None:
    with running_server(model, backup=False) as (contract, address):
        contract.version = "0"
        engine = sleeping(address)
        assert engine.needs_weights
        engine.wake()
        with pytest.raises(AssertionError, match="publish"):
            engine.generate(some_requests(1), SAMPLING)
        engine.sleep()
        publish(contract, engine)
        assert not engine.needs_weights
        engine.sleep()
        assert engine.needs_weights


def test_weights_that_changed_before_waking_end_the_run(model: Path) -> None:
    with running_server(model, backup=False) as (contract, address):
        contract.version = "0"
        engine = sleeping(address)
        publish(contract, engine)
        contract.faults.changed_weights = 1
        with pytest.raises(RunError, match="have changed since they were sent") as caught:
            engine.wake()
        assert caught.value.problems[0].id == "sglang-weights-changed"


def test_a_server_without_checksums_is_woken_as_it_is(model: Path) -> None:
    with running_server(model, Faults(older=True), backup=False) as (contract, address):
        contract.version = "0"
        engine = sleeping(address)
        publish(contract, engine)
        engine.wake()
        assert len(engine.generate(some_requests(1), SAMPLING)) == 1


def test_a_server_that_stays_busy_is_not_made_to_release_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MEMORY_SECONDS", 0.2)
    with running_server(model, Faults(busy_flushes=10_000)) as (contract, address):
        engine = engine_for(address)
        engine.release_memory = True
        with pytest.raises(StatusFault):
            engine.sleep()
        assert contract.away == set()


def test_the_version_after_an_update_is_looked_up(server: ContractServer, served: tuple[ContractServer, str]) -> None:
    engine = engine_for(served[1])
    engine.weights_updated(0)
    with pytest.raises(RunError) as caught:
        engine.weights_updated(1)
    assert caught.value.problems[0].id == "sglang-stale-weights"
    assert engine.weight_version == "0"


def test_starting_servers_answer_503(model: Path) -> None:
    with running_server(model, Faults(starting=1e6)) as (_, address):
        with pytest.raises(StatusFault) as caught:
            SglangClient(address).request("GET", "/health", timeout=30)
        assert caught.value.status == 503


KINDS: list[Fault] = [
    Fault("none"),
    Fault("none"),
    Fault("abort", tokens=0),
    Fault("abort", tokens=1),
    Fault("abort", tokens=5),
    Fault("disconnect"),
    Fault("cut"),
    Fault("slow", seconds=0.02),
]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(1, 20),
    faults=st.lists(st.sampled_from(KINDS), max_size=60),
    partial=st.booleans(),
    concurrency=st.sampled_from([1, 4, 16]),
)
def test_no_fault_loses_doubles_or_cuts_a_sample(
    server: ContractServer,
    served: tuple[ContractServer, str],
    embedded: EmbeddedEngine,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    faults: list[Fault],
    partial: bool,
    concurrency: int,
) -> None:
    # More tries than faults, so that every call has to succeed.
    monkeypatch.setattr(engine_module, "CONNECTION_TRIES", 64)
    monkeypatch.setattr(engine_module, "ABORT_TRIES", 64)
    server.requests.clear()
    server.faults = Faults(generate=list(faults))
    requests = some_requests(count)
    got = engine_for(served[1], partial=partial, concurrency=concurrency).generate(requests, SAMPLING)
    assert_equal(got, embedded.generate(requests, SAMPLING))
    assert max(Counter(body["rid"] for body in generated(server)).values()) == 1


@pytest.mark.parametrize("partial", [True, False])
def test_an_aborted_reply_that_is_complete_is_not_continued(
    server: ContractServer, served: tuple[ContractServer, str], embedded: EmbeddedEngine, partial: bool
) -> None:
    """Else text after the end would be trained on."""
    requests = some_requests(24)
    expected = embedded.generate(requests, SAMPLING)
    server.faults.order([Fault("abort", tokens=99)] * 24)
    assert_equal(engine_for(served[1], partial=partial).generate(requests, SAMPLING), expected)
    assert len(generated(server)) == 24


@pytest.mark.parametrize("pool", [8, 9, 11])
def test_a_response_cut_short_by_the_server_is_an_error(
    server: ContractServer, served: tuple[ContractServer, str], pool: int
) -> None:
    server.faults.pool = pool
    long = replace(SAMPLING, stop_token_ids=())
    with pytest.raises(RunError) as caught:
        engine_for(served[1]).generate([Request((1,), next(SEEDS))], long)
    (problem,) = caught.value.problems
    assert problem.id == "sglang-cut-short"
    assert problem.got.startswith(f"{pool - 3} tokens")
    assert "--rollout-max-response-len" in problem.fix


def test_a_prompt_longer_than_the_server_accepts_is_refused(
    server: ContractServer, served: tuple[ContractServer, str]
) -> None:
    engine = SglangEngine(
        engine_for(served[1]).targets,
        vocab_size=VOCAB,
        max_positions=POSITIONS,
        max_prompt=4,
        rollout=RolloutSection(),
        concurrency=1,
    )
    engine.generate([Request((1, 2, 3, 4), next(SEEDS))], SAMPLING)
    server.requests.clear()
    with pytest.raises(RunError, match="longer than the server accepts"):
        engine.generate([Request((1, 2, 3, 4, 5), next(SEEDS))], SAMPLING)
    assert not server.requests


def test_a_storm_of_aborts_is_one_line(
    server: ContractServer, served: tuple[ContractServer, str], caplog: pytest.LogCaptureFixture
) -> None:
    long = replace(SAMPLING, stop_token_ids=())
    server.faults.order([Fault("abort", tokens=1)] * 40)
    with caplog.at_level("WARNING"):
        engine_for(served[1], partial=True).generate(some_requests(16), long)
    lines = [record.getMessage() for record in caplog.records if "abort" in record.getMessage()]
    assert lines == [f"SGLang server {served[1]} aborted 40 requests of this rollout; they were repeated"]


@pytest.mark.parametrize("top_k", [0, -1, 1])
def test_every_setting_is_one_that_the_server_takes(
    server: ContractServer, served: tuple[ContractServer, str], embedded: EmbeddedEngine, top_k: int
) -> None:
    sampling = replace(SAMPLING, top_k=top_k)
    requests = [Request((1, 2), 2**63 - 2 - top_k)]
    assert_equal(engine_for(served[1]).generate(requests, sampling), embedded.generate(requests, sampling))


def test_aborts_with_progress_are_repeated_without_end(
    server: ContractServer,
    served: tuple[ContractServer, str],
    embedded: EmbeddedEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "ABORT_TRIES", 2)
    long = replace(SAMPLING, stop_token_ids=())
    requests = some_requests(1)
    server.faults.order([Fault("abort", tokens=1)] * (long.max_new_tokens - 1))
    got = engine_for(served[1], partial=True).generate(requests, long)
    assert len(got[0].tokens) == len(got[0].log_probs) == long.max_new_tokens
