"""Whole PPO runs that generate on servers: equal to the run of the embedded engine, on servers of both kinds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_cli.config import sglang_options
from relax_cli.config.layers import Layers
from relax_cli.engine.evaluate import evaluate
from relax_cli.errors import RunError
from relax_cli.plugin.manager import load_plugins
from relax_cli.preflight.check_eval import check_evaluation
from tests.support.local_runs import Finished, train
from tests.support.processes import started_by
from tests.support.sglang.fake_package import write_package
from tests.support.sglang.faults import Fault, Faults, to_json
from tests.support.sglang.server import running_server

SGLANG = ("rollout.rollout_engine=sglang", 'sglang.sglang_options={"device": "cpu"}')
SMALL = (
    "batch.rollout_batch_size=32",
    "batch.micro_batch_size=16",
    "batch.num_rollout=3",
    "critic.num_critic_only_steps=1",
    "parallel.device=cpu",
)
CLOCK = ("time", "seconds", "tokens_per_second", "memory")
SLEEPS = ("parallel.offload_rollout=true", "eval.eval_interval=1")


@pytest.fixture(scope="module")
def embedded(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The run that the others are compared with."""
    return train(task, tmp_path_factory.mktemp("embedded") / "run", "tiny-ppo-cpu", *SMALL)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`sglang` is installed, and is the contract server."""
    folder = str(write_package(tmp_path / "packages"))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", folder)
    sglang_options.installed_options.cache_clear()
    yield
    sglang_options.installed_options.cache_clear()


def numbers(finished: Finished) -> list[dict[str, Any]]:
    """What `metrics.jsonl` says of steps that does not depend on the clock."""
    steps = [step for step in finished.metrics if "reward/mean" in step]
    return [{k: v for k, v in step.items() if not any(part in k for part in (*CLOCK, "eval/"))} for step in steps]


def assert_equal_runs(got: Finished, expected: Finished) -> None:
    """The same samples, and the same metrics up to rounding."""
    for mine, theirs in zip(got.samples, expected.samples, strict=True):
        assert [s["response_token_ids"] for s in mine] == [s["response_token_ids"] for s in theirs]
        assert [s["finish_reason"] for s in mine] == [s["finish_reason"] for s in theirs]
        for one, other in zip(mine, theirs, strict=True):
            assert one["log_probs"] == pytest.approx(other["log_probs"], abs=1e-4)
    assert len(numbers(got)) == len(numbers(expected)) == 3
    for step, other_step in zip(numbers(got), numbers(expected), strict=True):
        assert step == pytest.approx(other_step, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("transport", "sleeps"), [("auto", False), ("disk", True)])
def test_a_run_on_an_external_server_equals_the_embedded_run(
    task: Path, embedded: Finished, tmp_path: Path, transport: str, sleeps: bool
) -> None:
    """The one that sleeps forgets its weights, also after an evaluation, which the next rollout follows."""
    faults = Faults(generate=[Fault("none"), Fault("abort", tokens=1), Fault("disconnect"), Fault("cut")] * 4)
    with running_server(task / "model", faults, backup=False) as (contract, address):
        external = ["sglang.rollout_external=true", f"sglang.rollout_external_engine_addrs=[{address}]"]
        heldout = tmp_path / "heldout.jsonl"
        heldout.write_text("".join((task / "data" / "heldout.jsonl").read_text().splitlines(True)[:4]))
        if sleeps:
            external += (*SLEEPS, f'eval.eval_prompt_data=["heldout={heldout}"]')
        way = f"sglang.update_weight_transport={transport}"
        got = train(task, tmp_path / "run", "tiny-ppo-cpu", *SMALL, *external, way, "rollout.partial_rollout=true")
        assert contract.version == "3"
        assert not contract.dead
        assert faults.generate == []
        # A server that is not ours is never stopped, and put to sleep only where that is requested.
        paths = [path for path, _ in contract.requests]
        assert ("/release_memory_occupation" in paths) is sleeps
        # Asleep it forgets its weights: each of 4 evaluations and 3 rollouts gets them, and they are looked at twice.
        assert paths.count("/weights_checker") == (14 if sleeps else 0)
        assert paths.count("/update_weights_from_disk") == (7 if sleeps else 0)
    assert_equal_runs(got, embedded)


def test_a_run_that_starts_its_server_equals_the_embedded_run(
    task: Path, embedded: Finished, tmp_path: Path, package: None
) -> None:
    got = train(task, tmp_path / "run", "tiny-ppo-cpu", *SMALL, *SGLANG)
    assert_equal_runs(got, embedded)
    log = (tmp_path / "run" / "logs" / "sglang-0.log").read_text()
    # Without a GPU there is no memory to give up; a real server refuses the memory saver then.
    assert "memory_occupation" not in log
    assert "POST /flush_cache" in log
    assert "AssertionError" not in log
    assert started_by(os.getpid(), "launch_server") == []


def test_an_evaluation_without_a_trainer_starts_a_server(task: Path, tmp_path: Path, package: None) -> None:
    plugins, found = load_plugins(), {}
    for name in ("embedded", "sglang"):
        words = [
            *(SGLANG if name == "sglang" else ()),
            f"rollout.rollout_engine={name}",
            "eval.eval_temperature=0",
            f"run.run_dir={tmp_path / name}",
        ]
        layers = Layers(["tiny-ppo-cpu"], {"TINY_DIR": str(task)}, [*words, "parallel.device=cpu"])
        checked = check_evaluation(plugins, layers).require_valid()
        evaluate(plugins, checked, None, lambda _: None)
        found[name] = (tmp_path / name / "metrics.jsonl").read_text().partition("eval/")[2]
    assert found["sglang"] == found["embedded"]


def test_a_crashed_server_restarts_with_the_newest_weights(
    task: Path, embedded: Finished, tmp_path: Path, package: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It dies in the second step, and the next one in the third.
    faults = Faults(generate=[Fault("none")] * 40 + [Fault("crash")])
    monkeypatch.setenv("CONTRACT_FAULTS", json.dumps(to_json(faults)))
    got = train(task, tmp_path / "run", "tiny-ppo-cpu", *SMALL, *SGLANG)
    assert [step.pop("rollout/server_restarts", 0) for step in got.metrics] == [0, 1, 1]
    assert_equal_runs(got, embedded)


def test_a_server_that_dies_again_ends_the_run_with_its_log(
    task: Path, tmp_path: Path, package: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(generate=[Fault("crash")])
    monkeypatch.setenv("CONTRACT_FAULTS", json.dumps(to_json(faults)))
    with pytest.raises(RunError, match="ended while it generated") as caught:
        train(task, tmp_path / "run", "tiny-ppo-cpu", *SMALL, *SGLANG)
    problem = caught.value.problems[0]
    assert problem.id == "sglang-server-died"
    assert "Scheduler hit an exception: AssertionError" in problem.got
    assert problem.where == os.fspath(tmp_path / "run" / "logs" / "sglang-0.log")
    assert started_by(os.getpid(), "launch_server") == []


@pytest.mark.parametrize(
    ("pool", "options", "said"),
    [
        (10, (), "longer than the server accepts"),
        (16, ("rollout.rollout_max_response_len=10",), "no room for 10"),
        (16, ("eval.eval_max_response_len=10",), "no room for 10"),
    ],
)
def test_prompts_without_room_are_refused_before_a_step(
    task: Path, tmp_path: Path, pool: int, options: tuple[str, ...], said: str
) -> None:
    with running_server(task / "model", Faults(pool=pool)) as (contract, address):
        external = ["sglang.rollout_external=true", f"sglang.rollout_external_engine_addrs=[{address}]"]
        held_out = (f"eval.eval_prompt_data=[own={task / 'data/heldout.jsonl'}]", "eval.eval_interval=9")
        with pytest.raises(RunError, match=said) as caught:
            train(task, tmp_path / "run", "tiny-ppo-cpu", *SMALL, *external, *held_out, *options)
        assert not [path for path, _ in contract.requests if "generate" in path]
    problem = caught.value.problems[0]
    assert problem.id == "rollout-prompt"
    assert ".jsonl:" in problem.where
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()
