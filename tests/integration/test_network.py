"""A run on two ranks with the real Ray, TransferQueue and gloo: its numbers, and what it opens to the network."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_cli.checkpoint import layout
from relax_cli.config.placement import STORAGE_UNITS
from relax_cli.engine.ray.queue_keys import greet
from tests.support.cli_runs import RELAX, wait_for
from tests.support.local_runs import Finished, train
from tests.support.processes import Listening, listening, reachable_from_outside, started_by
from tests.support.queue_attack import send_hostile

OPTIONS = (
    "batch.rollout_batch_size=8",
    "batch.n_samples_per_prompt=4",
    "batch.micro_batch_size=8",
    "batch.num_steps_per_rollout=1",
    "algorithm.use_kl_loss=true",
    "algorithm.kl_loss_coef=0.1",
    "algorithm.kl_loss_type=k3",
    "algorithm.kl_coef=0.2",
    "optimizer.lr=3e-3",
)
STORAGE_AND_CONTROLLER = {"ray::SimpleStor", "ray::TransferQu"}
"""The first 15 letters of their process names: all that the kernel keeps."""


@dataclass
class Running:
    """A run in the middle of its steps."""

    process: subprocess.Popen[str]
    folder: Path
    listening: Listening

    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def wait_for_step(self, count: int) -> None:
        wait_for(lambda: len(self.metrics()) >= count, self.process, pause=0.2)


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run in one process saves its steps."""
    return tmp_path_factory.mktemp("alone") / "actor"


@pytest.fixture(scope="module")
def alone(task: Path, saves: Path) -> Finished:
    """Three steps of the same run in one process."""
    every_step = (f"checkpoint.save={saves}", "checkpoint.save_interval=1", "batch.num_rollout=3")
    found = train(task, saves.parent / "run", "tiny-grpo-cpu", *OPTIONS, *every_step)
    layout.write_tracker(saves, 1)
    return found


@pytest.fixture(scope="module")
def running(task: Path, alone: Finished, saves: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The run from its second step on: on Ray with two ranks of the actor and of the reference, until Ctrl-C."""
    out = tmp_path_factory.mktemp("network")
    ranks = 'parallel.resource={"actor": [1, 2], "rollout": [1, 1]}'
    more = (ranks, "batch.num_rollout=1000", "eval.eval_prompt_data=[]", "eval.eval_interval=null")
    more = (*more, f"checkpoint.load={saves}", f"checkpoint.save={out / 'actor'}", "checkpoint.save_interval=1000")
    words = [word for option in (*OPTIONS, *more) for word in ("--set", option)]
    process = subprocess.Popen(
        [*RELAX, "train", "--recipe", "tiny-grpo-cpu", "--run-dir", str(out / "run"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TINY_DIR": str(task)},
        start_new_session=True,
    )
    run = Running(process, out / "run", {})
    try:
        run.wait_for_step(1)
        run.listening = listening(process.pid)
        yield run
        family = started_by(process.pid)
    finally:
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert ", then saving; Ctrl-C again stops now" in err
    assert "Traceback" not in err
    assert layout.read_tracker(out / "actor").iteration == run.metrics()[-1]["step"]
    assert psutil.wait_procs(family, timeout=60)[1] == []


def test_two_ray_ranks_with_a_reference_equal_one_process(running: Running, alone: Finished) -> None:
    running.wait_for_step(2)
    resource = json.loads((running.folder / "config.json").read_text())["config"]["parallel"]["resource"]
    assert resource["reference"] == [1, 2]
    assert (running.folder / "logs" / "reference-1.log").exists()
    for ours, theirs in zip(running.metrics()[:2], alone.metrics[1:], strict=True):
        assert ours.keys() == theirs.keys()
        assert (ours["step"], ours["reward/mean"]) == (theirs["step"], theirs["reward/mean"])
        for name in ("pg_loss", "kl_loss", "kl_penalty", "ppo_kl", "entropy", "actor/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], abs=2e-5), name
        # In a group of equal rewards the deviation is that of the KL penalty, down to its rounding.
        assert ours["advantages/std"] == pytest.approx(theirs["advantages/std"], abs=2e-3)


def test_every_socket_of_a_run_is_on_loopback(running: Running) -> None:
    assert {name[:15] for name in running.listening.values()} >= STORAGE_AND_CONTROLLER
    assert reachable_from_outside(running.listening) == {}


def test_a_stranger_runs_nothing_in_a_run(running: Running, tmp_path: Path) -> None:
    ports = [port for (_, port), name in running.listening.items() if name[:15] in STORAGE_AND_CONTROLLER]
    send_hostile([("127.0.0.1", port) for _, port in running.listening], tmp_path, None)
    running.wait_for_step(len(running.metrics()) + 2)
    assert list(tmp_path.iterdir()) == []
    mechanisms = [greet("127.0.0.1", port) for port in ports]
    assert mechanisms.count("CURVE") == 2 + STORAGE_UNITS, "two of the controller, one of each storage unit"
    assert "NULL" not in mechanisms
