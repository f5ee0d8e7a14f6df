"""PPO on a real SGLang server without a GPU; `tests/support/sglang/cpu/install.sh` makes an environment for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from relax_cli.backends.rollout.sglang.client import API_KEY, SglangClient
from relax_cli.backends.rollout.sglang.server import LocalServer, launch_command, server_environment
from relax_cli.config.schema import SglangSection
from relax_cli.config.sglang_options import as_arguments, installed_options
from relax_cli.errors import EnvironmentFault, RunError
from tests.support.local_runs import Finished, train
from tests.support.processes import started_by
from tests.support.tiny_models import save_experts_for_task, save_tiny_model

PYTHON = os.environ.get("RELAX_SGLANG_PYTHON", "")
OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "max_total_tokens": 16384,
    "max_running_requests": 64,
    "skip_server_warmup": True,
}
SMALL = ("batch.rollout_batch_size=64", "batch.micro_batch_size=32", "parallel.device=cpu")
OWN = ("rollout.rollout_engine=sglang", f"sglang.sglang_options={json.dumps(OPTIONS)}")
ROUNDING = 2e-5
"""Largest difference of a log-probability that two programs compute in fp32."""

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(
        not PYTHON,
        reason="needs RELAX_SGLANG_PYTHON=DIR/bin/python, which tests/support/sglang/cpu/install.sh DIR makes",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """What the servers find in their environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OMP_NUM_THREADS", "SGLANG_USE_CPU_ENGINE"):
            patch.setenv(name, "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        patch.delenv("RELAX_SGLANG_PYTHON")
        yield


@pytest.fixture(scope="module")
def external(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server that wants an API key and is not the run's."""
    # None of these may reach a sample.
    preferred = json.dumps({"repetition_penalty": 2.0, "min_p": 0.9, "ignore_eos": True, "logit_bias": {"3": 9.0}})
    own = {"api_key": "secret", "preferred_sampling_params": preferred}
    section = SglangSection(sglang_python=PYTHON, sglang_options=OPTIONS | own)
    command = launch_command(task / "model", section, host="127.0.0.1", seed=1, memory_saver=False)
    server = LocalServer(
        command,
        tmp_path_factory.mktemp("external") / "log",
        environment=server_environment(os.environ, other_python=True),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(API_KEY, "secret")
        server.start()
        yield server
    server.stop()


@pytest.fixture(scope="module")
def experts(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, LocalServer]]:
    """A random mixture of experts for the same data, and a server of it that returns routes."""
    folder = tmp_path_factory.mktemp("experts")
    save_experts_for_task(folder / "model", num_experts=16)
    (folder / "data").symlink_to(task / "data")
    section = SglangSection(sglang_python=PYTHON, sglang_options=OPTIONS)
    command = launch_command(folder / "model", section, host="127.0.0.1", seed=1, memory_saver=False, routes=True)
    server = LocalServer(command, folder / "log", environment=server_environment(os.environ, other_python=True))
    server.start()
    yield folder, server
    server.stop()


def on(server: LocalServer, *more: str) -> tuple[str, ...]:
    """Options of a run on a server that runs."""
    return (
        *SMALL,
        "sglang.rollout_external=true",
        f"sglang.rollout_external_engine_addrs=[{server.address}]",
        *more,
    )


def assert_newest_weights(finished: Finished) -> None:
    """Every response was sampled with the weights that score it."""
    gaps = [gap for step in finished.metrics if (gap := step.get("train_rollout_logprob_diff/max")) is not None]
    assert len(gaps) >= 4, "of steps in which the actor learns"
    assert max(gaps) < ROUNDING, gaps


def wait_for_steps(run_dir: Path, count: int, run: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until so many steps have finished."""
    path, deadline = run_dir / "metrics.jsonl", time.monotonic() + 500
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert run is None or run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def servers() -> list[psutil.Process]:
    """Processes of SGLang that this one has started."""
    return started_by(os.getpid(), "sglang")


PARSER = """
import argparse, contextlib, io, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for line in sys.stdin:
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        parser.parse_args(["--model-path", "m", *json.loads(line)])
        print("taken", line, end="")
"""


def test_no_option_that_the_real_parser_takes_is_refused() -> None:
    options = installed_options(PYTHON)
    assert options is not None
    values = (True, "true", "zzz", "1.5", 3, ["a", "b"])
    cases = [(name, value) for name in options for value in (*values, *options[name].choices)]
    refused = [json.dumps(as_arguments({name: value})) for name, value in cases if options[name].expected(value)]
    assert len(refused) > 1000
    env = os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(
        [PYTHON, "-c", PARSER],
        input="\n".join([*refused, "[]", ""]),
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("taken")] == ["taken []"], done.stderr


def test_ppo_learns_on_a_server_that_crashes_once(task: Path, tmp_path: Path) -> None:
    """Its scheduler is killed in the middle; the new server gets the newest weights. First: memory for one server."""

    def kill() -> None:
        wait_for_steps(tmp_path / "run", 4)
        (scheduler,) = started_by(os.getpid(), "scheduler")
        scheduler.kill()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    more = ("batch.num_rollout=20", "batch.rollout_batch_size=256", "critic.num_critic_only_steps=3", *OWN)
    finished = train(task, tmp_path / "run", "tiny-ppo-cpu", *SMALL[1:], *more, f"sglang.sglang_python={PYTHON}")
    rewards = [step["reward/mean"] for step in finished.metrics]
    assert len(rewards) == 20
    assert sum(step.get("rollout/server_restarts", 0) for step in finished.metrics) == 1
    assert_newest_weights(finished)
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.2, rewards
    assert servers() == []
    log = (tmp_path / "run" / "logs" / "sglang-0.log").read_text("utf-8", errors="replace")
    assert "crash diagnostics" not in log, "a server that crashes does not wait"


@pytest.mark.parametrize(
    ("way", "sleeps"), [("tensor", False), ("tensor", True), ("distributed", False), ("disk", True)]
)
def test_weights_arrive_by_every_transport(
    task: Path, external: LocalServer, tmp_path: Path, way: str, sleeps: bool
) -> None:
    """Without a GPU a server that sleeps keeps its memory, but takes the requests and says its checksums."""
    transport = f"sglang.update_weight_transport={way}"
    offload = f"parallel.offload_rollout={str(sleeps).lower()}"
    more = ("batch.num_rollout=4", "critic.num_critic_only_steps=0", transport, offload)
    finished = train(task, tmp_path / "run", "tiny-ppo-cpu", *on(external, *more))
    assert len(finished.metrics) == 4
    assert_newest_weights(finished)
    assert not (tmp_path / "run" / "weights").exists()


@pytest.mark.parametrize("way", ["tensor", "distributed", "disk"])
def test_experts_arrive_one_by_one_and_their_routes_return(
    experts: tuple[Path, LocalServer], tmp_path: Path, way: str
) -> None:
    folder, server = experts
    more = ("batch.num_rollout=4", "critic.num_critic_only_steps=0", "parallel.router_replay=true")
    transport = f"sglang.update_weight_transport={way}"
    finished = train(folder, tmp_path / "run", "tiny-ppo-cpu", *on(server, *more, transport))
    assert_newest_weights(finished)
    # In fp32 hardly two experts are so near that programs choose another one.
    assert max(step["router_mismatch_frac"] for step in finished.metrics) < 0.01


def test_a_server_with_another_model_is_refused(external: LocalServer, task: Path, tmp_path: Path) -> None:
    other = tmp_path / "task" / "model"
    save_tiny_model(other, "qwen3", layers=3, vocab=16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((task / "model" / name).read_bytes())
    (tmp_path / "task" / "data").symlink_to(task / "data")
    with pytest.raises(EnvironmentFault, match="serves another model") as caught:
        train(tmp_path / "task", tmp_path / "run", "tiny-ppo-cpu", *on(external))
    assert caught.value.problems[0].id == "sglang-external-model"


def test_a_server_that_wants_a_key_is_named(
    external: LocalServer, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(API_KEY)
    with pytest.raises(EnvironmentFault, match="wants an API key"):
        train(task, tmp_path / "run", "tiny-ppo-cpu", *on(external))


def test_lengths_that_the_server_would_cut_are_refused(external: LocalServer, task: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no room for 58 new ones") as caught:
        train(task, tmp_path / "run", "tiny-ppo-cpu", *on(external, "rollout.rollout_max_response_len=58"))
    assert caught.value.problems[0].got == "64 positions"
    assert caught.value.problems[0].expected == "at most 62"


def test_an_interrupt_leaves_an_external_server_alone(external: LocalServer, task: Path, tmp_path: Path) -> None:
    words = [part for option in on(external, "parallel.launcher=local") for part in ("--set", option)]
    command = [sys.executable, "-m", "relax_cli", "train", "--recipe", "tiny-ppo-cpu", "--run-dir", str(tmp_path / "r")]
    with (tmp_path / "screen").open("wb") as screen:
        run = subprocess.Popen(
            [*command, *words], env={**os.environ, "TINY_DIR": str(task)}, stdout=screen, stderr=screen
        )
        wait_for_steps(tmp_path / "r", 1, run)
        run.send_signal(signal.SIGINT)
        assert run.wait(120) == 130, (tmp_path / "screen").read_text()
    assert SglangClient(external.address).request("GET", "/health_generate", timeout=30) is None


def test_the_check_for_gpus_passes_its_stages(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "gpu_check_servers.py"
    options = ["--sglang-python", PYTHON, "--set", f"sglang.sglang_options={json.dumps(OPTIONS)}"]
    command = [sys.executable, script, "--device", "cpu", "--out", tmp_path / "out", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    stages = json.loads((tmp_path / "out" / "servers.json").read_text())["stages"]
    assert stages["gap"]["max"] < ROUNDING
