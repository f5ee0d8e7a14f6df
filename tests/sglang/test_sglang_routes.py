"""The experts that tokens went to, from the engine that generated them to the queue."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_cli.backends.rollout.embedded.engine import EmbeddedEngine
from relax_cli.backends.rollout.protocol import Request, SamplingParams
from relax_cli.backends.rollout.sglang.connect import open_engine
from relax_cli.backends.rollout.sglang.replies import generate_payload, read_part
from relax_cli.config.schema import ParallelSection, RolloutSection, SglangSection
from relax_cli.errors import EnvironmentFault, RunError
from relax_cli.models.spec import MoeSpec, read_spec
from tests.support.conversations import converse
from tests.support.sglang.faults import Fault, Faults
from tests.support.sglang.server import ContractServer, running_server
from tests.support.tiny_models import save_tiny_model

SAMPLING = SamplingParams(10, 0.9, 1.0, -1, (3, 4, 5), routes=True)
REQUESTS = [Request(tuple(range(5, 5 + length)), 100 + seed) for seed, length in enumerate((3, 20, 3, 7, 1, 20))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "qwen3_moe", layers=3, num_experts=8)
    return folder


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[tuple[ContractServer, str]]:
    with running_server(model, routes=True) as (contract, address):
        yield contract, address


def attached(model: Path, address: str, **rollout: Any) -> Any:
    engine = open_engine(
        SglangSection(rollout_external=True, rollout_external_engine_addrs=(address,)),
        RolloutSection(**rollout),
        ParallelSection(router_replay=True),
        model_folder=model,
        run_dir=model,
        rank=0,
        workers=1,
    )
    engine.use_loaded()
    return engine


def test_routes_do_not_depend_on_the_batch(model: Path) -> None:
    # A few rows at a time, so that rows move and new ones join; equal prompts are computed once.
    whole, few = (EmbeddedEngine(model, decode=None, max_batch_size=size) for size in (8, 2))
    for request, one, other in zip(
        REQUESTS, whole.generate(REQUESTS, SAMPLING), few.generate(REQUESTS, SAMPLING), strict=True
    ):
        assert one.routes is not None
        assert one.routes.shape == (len(request.prompt_tokens) + len(one.tokens) - 1, 3, 2)
        assert np.array_equal(one.routes, other.routes)  # type: ignore[arg-type]
        # The last layer does not compute the prompt but its last token.
        assert (one.routes[: len(request.prompt_tokens) - 1, 2] == -1).all()
        assert (one.routes[len(request.prompt_tokens) - 1 :] >= 0).all()
        assert (one.routes[:, :2] >= 0).all()
    plain = whole.generate(REQUESTS, replace(SAMPLING, routes=False))
    assert [g.tokens for g in plain] == [g.tokens for g in whole.generate(REQUESTS, SAMPLING)]
    assert plain[0].routes is None


def test_routes_of_a_conversation_cover_all_turns(model: Path) -> None:
    engine = EmbeddedEngine(model, decode=None)
    for turns in converse(engine, REQUESTS, SAMPLING, 3):
        request, generation = turns[-1]
        alone = EmbeddedEngine(model, decode=None).generate([request], SAMPLING)[0]
        assert alone.routes is not None
        assert generation.routes is not None
        assert generation.routes.shape == alone.routes.shape
        known = alone.routes >= 0
        assert np.array_equal(generation.routes[known], alone.routes[known])
        # The response of the first turn is known in the last layer as well.
        first = len(turns[0][0].prompt_tokens)
        assert (generation.routes[first - 1 : first + len(turns[0][1].tokens) - 1] >= 0).all()


@pytest.mark.parametrize("partial", [False, True])
def test_a_server_returns_what_the_embedded_engine_does(
    model: Path, served: tuple[ContractServer, str], partial: bool
) -> None:
    contract, address = served
    contract.faults = Faults([Fault("abort", tokens=2)] * 4)
    ours = EmbeddedEngine(model, decode=None).generate(REQUESTS, SAMPLING)
    for one, other in zip(
        ours, attached(model, address, partial_rollout=partial).generate(REQUESTS, SAMPLING), strict=True
    ):
        assert one.routes is not None
        assert other.routes is not None
        assert one.tokens == other.tokens
        known = one.routes >= 0
        assert np.array_equal(np.sort(one.routes)[known], other.routes[known])


def test_a_server_without_routes_is_refused(model: Path, served: tuple[ContractServer, str]) -> None:
    contract, address = served
    contract.routes = False
    with pytest.raises(EnvironmentFault) as caught:
        attached(model, address)
    contract.routes = True
    engine = attached(model, address)
    contract.routes = False
    with pytest.raises(RunError) as later:
        engine.generate(REQUESTS, SAMPLING)
    contract.routes = True
    for error in (caught, later):
        assert [problem.id for problem in error.value.problems] == ["sglang-no-routes"]


@pytest.mark.parametrize(
    "said", ["", "?", [1], [[0, 1], [2, 3]], [[0, 0], [1, 2], [3, 4]], [[0, 1], [2, 8], [3, 4]], [[-1, 1]] * 3]
)
def test_routes_that_cannot_be_are_refused(model: Path, said: Any) -> None:
    spec = read_spec(model)
    assert isinstance(spec, MoeSpec)
    text = said if isinstance(said, str) else encoded(said)
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 2]], "weight_version": "0"}
    reply = {"output_ids": [2], "meta_info": meta | {"routed_experts": text}}
    more: Any = {"sample": "it", "max_new_tokens": 3, "vocab_size": 9, "version": "0", "sampling": SAMPLING}
    more |= {"prompt": 3, "experts": replace(spec, num_layers=1)}
    with pytest.raises(RunError) as caught:
        read_part(reply, **more)
    assert caught.value.problems[0].id == "sglang-reply"
    meta["routed_experts"] = encoded([[1, 0], [2, 7], [3, 4]])
    part = read_part({"output_ids": [2], "meta_info": meta}, **more)
    assert part.routes is not None
    assert part.routes.tolist() == [[[0, 1]], [[2, 7]], [[3, 4]]]


def encoded(routes: list[Any]) -> str:
    return base64.b64encode(np.array(routes, np.int32).tobytes()).decode()


def test_only_requests_that_train_ask_for_routes() -> None:
    asked, plain = (generate_payload("a", (1,), 1, 2, replace(SAMPLING, routes=on)) for on in (True, False))
    assert asked.pop("return_routed_experts") is True
    assert asked == plain
