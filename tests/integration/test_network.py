"""What a run on one machine opens to the network, with the real Ray, TransferQueue and gloo."""

from __future__ import annotations

import ipaddress
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from relax_cli.config.placement import STORAGE_UNITS
from relax_cli.engine.ray.queue_keys import greet
from relax_cli.quickstart.task import prepare
from tests.support.cli_runs import start
from tests.support.queue_attack import send_hostile

RANKS = '{"actor": [1, 2], "critic": [1, 1], "rollout": [1, 1], "advantages": [1, 0]}'
STORAGE_AND_CONTROLLER = {"ray::SimpleStor", "ray::TransferQu"}
"""The first 15 letters of their process names: all that the kernel keeps."""


@dataclass
class Running:
    """A run in the middle of its steps."""

    process: subprocess.Popen[str]
    metrics: Path
    listening: dict[tuple[str, int], str]
    """Address and port to the name of the process."""

    def steps(self) -> int:
        return len(self.metrics.read_text().splitlines()) if self.metrics.exists() else 0

    def wait_for_step(self, count: int) -> None:
        deadline = time.monotonic() + 150
        while self.steps() < count:
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A run of PPO on Ray with two actor ranks, after its first step."""
    out = tmp_path_factory.mktemp("network")
    prepare(out / "task", seed=1, steps=3)
    process = start(out / "task", out, "--num-rollout", "1000", "--resource", RANKS, "--save-interval", "1000")
    run = Running(process, out / "run" / "metrics.jsonl", {})
    try:
        run.wait_for_step(1)
        for member in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            for connection in member.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    run.listening[tuple(connection.laddr)] = member.name()
        yield run
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def test_every_socket_of_a_run_is_on_loopback(running: Running) -> None:
    assert {name[:15] for name in running.listening.values()} >= STORAGE_AND_CONTROLLER
    reachable = {}
    for (host, port), name in running.listening.items():
        address = ipaddress.ip_address(host)
        if not (getattr(address, "ipv4_mapped", None) or address).is_loopback:
            reachable[host, port] = name
    assert reachable == {}


def test_a_stranger_runs_nothing_in_a_run(running: Running, tmp_path: Path) -> None:
    ports = [port for (_, port), name in running.listening.items() if name[:15] in STORAGE_AND_CONTROLLER]
    send_hostile([("127.0.0.1", port) for _, port in running.listening], tmp_path, None)
    running.wait_for_step(running.steps() + 2)
    assert list(tmp_path.iterdir()) == []
    mechanisms = [greet("127.0.0.1", port) for port in ports]
    assert mechanisms.count("CURVE") == 2 + STORAGE_UNITS, "two of the controller, one of each storage unit"
    assert "NULL" not in mechanisms
