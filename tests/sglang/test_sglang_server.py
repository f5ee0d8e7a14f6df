"""Servers of a run: their command line, what is said when they fail, and that they end with their owner."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_cli.backends import ports
from relax_cli.backends.rollout.protocol import Request, SamplingParams, ServerDied
from relax_cli.backends.rollout.sglang import guard
from relax_cli.backends.rollout.sglang import server as server_module
from relax_cli.backends.rollout.sglang.engine import SglangEngine
from relax_cli.backends.rollout.sglang.server import NO_CRASH_DUMPS, LocalServer, launch_command, server_environment
from relax_cli.backends.rollout.targets import WeightTarget
from relax_cli.config.schema import RolloutSection, SglangSection
from relax_cli.errors import RunError

SERVER = """
import http.server, os, signal, sys
port, pid_file, health = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
open(pid_file, "w").write(str(os.getpid()))
print("loading the model", flush=True)
count = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global count
        count += 1
        self.send_response(503 if count <= health else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_POST(self):
        if self.path == "/generate":
            print("CUDA error: out of memory", flush=True)
            os._exit(7)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., LocalServer]:
    """A server that is a small script; `pid` in the test's folder tells its process."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)

    def build(*, starting: int = 0, shell: str | None = None, seconds: float = 120.0) -> LocalServer:
        def words(port: int) -> list[str]:
            if shell is not None:
                return ["sh", "-c", shell]
            return [sys.executable, str(script), str(port), str(tmp_path / "pid"), str(starting)]

        return LocalServer(
            words, tmp_path / "logs" / "sglang-0.log", environment=dict(os.environ), start_seconds=seconds
        )

    return build


def runs(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> None:
    """Wait for the end of a process, not for ever."""
    deadline = time.monotonic() + 60
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(pid)


def test_a_server_is_ready_when_it_generates_gone_when_stopped(
    make: Callable[..., LocalServer], tmp_path: Path
) -> None:
    server = make(starting=2)
    server.start()
    assert server.alive()
    assert "loading the model" in server.log_file.read_text()
    pid = int((tmp_path / "pid").read_text())
    assert runs(pid)
    server.stop()
    assert not server.alive()
    assert not runs(pid)
    server.stop()


def test_a_server_that_ends_while_starting_is_shown_with_its_log(make: Callable[..., LocalServer]) -> None:
    server = make(shell="echo unrecognized arguments: --foo; exit 3")
    with pytest.raises(RunError, match="ended while it was starting, exit code 3") as caught:
        server.start()
    problem = caught.value.problems[0]
    assert problem.id == "sglang-server-died"
    assert "unrecognized arguments: --foo" in problem.got
    assert problem.where == str(server.log_file)
    assert problem.fix == f"tail -n 60 {server.log_file}"


def test_a_port_taken_while_the_model_loads_is_replaced(
    make: Callable[..., LocalServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever has the port accepts connections and never answers.
    monkeypatch.setattr(server_module, "HEALTH_SECONDS", 2.0)
    server = make()
    taken = server.port
    with socket.create_server(("127.0.0.1", taken)):
        server.start()
    assert server.port != taken
    assert server.address == f"127.0.0.1:{server.port}"
    server.stop()


@pytest.mark.parametrize(
    "said",
    [
        "[Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use",
        "RuntimeError: port at 30000 is not available in 30 seconds.",
        "ValueError: Port is already in use. dist_init_port=30001",
    ],
)
def test_ports_are_tried_three_times_and_only_for_that(said: str, make: Callable[..., LocalServer]) -> None:
    for words, starts in ((said, 3), ("CUDA error: out of memory", 1)):
        server = make(shell=f"echo {shlex.quote(words)}; exit 1")
        with pytest.raises(RunError):
            server.start()
        assert server.log_file.read_text().count(words) == starts


def test_ports_of_servers_are_none_that_connections_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = int(ports.RANGE.read_text().split()[0])
    assert all(ports.LOWEST_PORT <= ports.lasting_port() < lowest for _ in range(20))
    whole = tmp_path / "range"
    whole.write_text("1024 65535\n")
    monkeypatch.setattr(ports, "RANGE", whole)
    assert ports.lasting_port() > 0


def test_a_server_that_never_answers_is_ended(make: Callable[..., LocalServer]) -> None:
    server = make(shell="echo $$; exec sleep 600", seconds=1.0)
    with pytest.raises(RunError) as caught:
        server.start()
    assert caught.value.problems[0].id == "sglang-server-slow"
    wait_until_gone(int(server.log_file.read_text()))


def test_a_server_that_dies_while_it_generates_ends_the_call(make: Callable[..., LocalServer]) -> None:
    server = make()
    server.start()
    more: Any = {"rollout": RolloutSection(), "concurrency": 512, "backoff": 0.5}
    target = WeightTarget(server.address, "here", 0, 1)
    engine = SglangEngine([target], vocab_size=9, max_positions=99, **more, servers=[server])
    with pytest.raises(RunError, match="ended while it generated, exit code 7") as caught:
        engine.generate([Request((1,), 1)] * 3, SamplingParams(4, 1.0, 1.0, -1, ()))
    assert "CUDA error: out of memory" in caught.value.problems[0].got
    engine.close()


def test_a_dead_server_is_revived_at_the_same_address_and_sleeps(
    make: Callable[..., LocalServer], tmp_path: Path
) -> None:
    server = make()
    server.start()
    target = WeightTarget(server.address, "here", 0, 1)
    more: Any = {"rollout": RolloutSection(), "concurrency": 512, "release_memory": True, "backoff": 0.01}
    engine = SglangEngine([target], vocab_size=9, max_positions=99, **more, servers=[server])
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    with pytest.raises(ServerDied, match="before /flush_cache, exit code 137"):
        engine.sleep()
    with pytest.raises(ServerDied):
        engine.generate([Request((1,), 1)], SamplingParams(4, 1.0, 1.0, -1, ()))
    engine.sleep()  # Says nothing: what failed is being raised.
    assert engine.revive() == 1
    assert server.alive()
    with pytest.raises(AssertionError, match="sleeps"):
        engine.generate([], SamplingParams(4, 1.0, 1.0, -1, ()))
    assert engine.revive() == 0
    engine.close()
    assert not server.alive()


def test_a_server_ends_when_its_owner_is_killed(make: Callable[..., LocalServer], tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from relax_cli.backends.rollout.sglang.server import LocalServer\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "words = lambda port: [sys.executable, str(folder / 'server.py'), str(port), str(folder / 'pid'), '0']\n"
        "LocalServer(words, folder / 'log', environment=dict(os.environ)).start()\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    pid = int((tmp_path / "pid").read_text())
    assert runs(pid)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_until_gone(pid)


def test_a_server_ends_when_its_guard_is_killed(make: Callable[..., LocalServer], tmp_path: Path) -> None:
    server = make()
    server.start()
    assert server._process is not None
    assert os.getsid(server._process.pid) == os.getsid(0)
    assert os.getpgid(server._process.pid) != os.getpgid(0)
    server._process.kill()
    wait_until_gone(int((tmp_path / "pid").read_text()))
    server.stop()


def test_a_command_that_heeds_no_signal_ends_with_its_children() -> None:
    heedless = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(600)"
    child = f"import os, signal, time; {heedless}"
    start = f"import os, signal, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen(
        [sys.executable, guard.__file__, sys.executable, "-c", f"{start}; {heedless}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert all(runs(pid) for pid in pids)
    process.stdin.close()
    assert process.wait(60) == 128 + signal.SIGKILL
    for pid in pids:
        wait_until_gone(pid)


def test_the_command_line_of_a_server() -> None:
    section = SglangSection(
        rollout_num_gpus_per_engine=2,
        sglang_mem_fraction_static=0.7,
        sglang_options={"attention_backend": "triton", "disable_radix_cache": True},
    )
    words = launch_command(Path("/m"), section, host="10.0.0.1", seed=5, memory_saver=True)(30000)
    assert words[1:3] == ["-m", "sglang.launch_server"]
    assert " ".join(words[3:]) == (
        "--model-path /m --host 10.0.0.1 --tp-size 2 --random-seed 5 --mem-fraction-static 0.7 --enable-memory-saver "
        "--attention-backend triton --disable-radix-cache --port 30000"
    )
    assert words[0] == sys.executable
    other = SglangSection(sglang_python="/opt/sgl/bin/python")
    assert launch_command(Path("/m"), other, host="h", seed=5, memory_saver=False)(1)[0] == "/opt/sgl/bin/python"
    plain = launch_command(Path("/m"), SglangSection(), host="h", seed=5, memory_saver=False)(1)
    assert " ".join(plain[3:]) == "--model-path /m --host h --tp-size 1 --random-seed 5 --port 1"


def test_a_server_does_not_get_what_is_meant_for_training() -> None:
    given = {
        "PATH": "p",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
        "SGL_RETURN_ORIGINAL_LOGPROB": "1",
        "SGLANG_GRPC_PORT": "50051",
        "SGLANG_RUST_SERVER": "1",
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "tcp://10.0.0.1:1",
        "TMS_INIT_ENABLE_CPU_BACKUP": "1",
        "TMS_INIT_ENABLE_DISK_BACKUP": "1",
        "CUDA_VISIBLE_DEVICES": "3",
    }
    assert server_environment(given) == {"PATH": "p", "CUDA_VISIBLE_DEVICES": "3", **NO_CRASH_DUMPS}
    elsewhere = server_environment({"PATH": "p", "PYTHONPATH": "/here"}, other_python=True)
    assert elsewhere == {"PATH": "p", **NO_CRASH_DUMPS}
    wanted = dict.fromkeys(NO_CRASH_DUMPS, "1")
    assert server_environment(wanted) == wanted


CAUSE = "OSError: libcuda.so.1: cannot open shared object file"


@pytest.mark.parametrize(
    ("lines", "first"),
    [
        (["loading", CAUSE, *["shutting down"] * 30], CAUSE),
        (["ValueError: old", CAUSE, *["  frame of a traceback"] * 30], CAUSE),
        (["[2026] FATAL: no memory", *["bye"] * 9], "[2026] FATAL: no memory"),
        (["fine", "bye"], "fine"),
    ],
)
def test_the_end_of_a_log_has_its_last_error_wherever_that_is(lines: list[str], first: str, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("RuntimeError: of an earlier start\n" * 40)
    program = f"print({chr(10).join(lines)!r})"
    server = LocalServer(lambda _: [sys.executable, "-c", program], log, environment={})
    with pytest.raises(ServerDied) as caught:
        server.start()
    said = caught.value.problems[0].got.splitlines()
    assert said[0] == first
    assert not any("earlier start" in line for line in said)
