"""One SGLang server on this machine: started, watched while it loads, ended with everything it started."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from relax_cli.backends.ports import lasting_port
from relax_cli.backends.rollout.protocol import ServerDied
from relax_cli.backends.rollout.sglang import guard
from relax_cli.backends.rollout.sglang.client import ConnectionFault, DeadlineFault, SglangClient, StatusFault, declare
from relax_cli.config.schema import SglangSection
from relax_cli.config.sglang_options import as_arguments
from relax_cli.errors import Problem, ProblemKind, RunError

DIED = declare(
    "sglang-server-died",
    "A server that the run started ended while it was loading, or twice in one step (the first time it is restarted). "
    "The last lines of its log are shown, and where the whole log is.",
)
SLOW = declare("sglang-server-slow", "A server did not answer within half an hour of its start.")

START_SECONDS = 1800.0
"""Deadline of loading a model; large ones come slowly from a network disk."""
HEALTH_SECONDS = 30.0
ENDING_SECONDS = 15.0
"""Deadline of a server's end; a process that waits for a disk does not even die of SIGKILL."""
POLL_SECONDS = 0.5
TAIL_BYTES = 1 << 20
TAIL_LINES = 8
ERROR_LINE = re.compile(
    r"^\s*(\w+\.)*\w*(Error|Exception)\b|\b(error|fatal|cannot open|out of memory)\b", re.IGNORECASE
)
"""A line that names a cause; frames of a traceback do not."""
PORT_TRIES = 3
PORT_TAKEN = re.compile(r"address already in use|port is already in use|port\b.* is not available", re.IGNORECASE)
"""What uvicorn or SGLang say when another process has bound the port first."""

OTHER_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Settings of the training processes' allocator: expandable segments exclude the server's memory saver."""
PACKAGES_OF_HERE = ("PYTHONPATH", "PYTHONHOME")
OTHER_SERVER = frozenset(
    f"{prefix}{name}"
    for prefix in ("SGLANG_", "SGL_")  # SGLang renames the old prefix to the new one.
    for name in (
        "RETURN_ORIGINAL_LOGPROB",  # log-probabilities ignore the temperature, which training does not
        "GRPC_PORT",  # one port for all servers of a machine, and refused together with an API key
        "RUST_SERVER",  # another server, which does not know the requests that bring weights
        "DISTRIBUTED_INIT_METHOD_OVERRIDE",  # ranks of all servers meet at one place
    )
)
"""Settings of the user that a server of the run must not have."""
MEMORY_SAVER = "TMS_INIT_"
"""Beginning of settings that make torch_memory_saver back up, on disk or in memory, what it does not have to keep."""
NO_CRASH_DUMPS = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
"""With them a server whose scheduler died ends at once; else it keeps its port open 5 s longer."""

log = logging.getLogger(__name__)


def launch_command(
    model_folder: Path, section: SglangSection, *, host: str, seed: int, memory_saver: bool, routes: bool = False
) -> Callable[[int], list[str]]:
    """The command line of a server, once its port is known.

    Args:
        seed: of sampling without per-request seeds.
        memory_saver: let `sleep` give up memory. Weights are not kept: they are sent again before they are needed.
        routes: let replies say which experts each token went to.
    """
    arguments = {
        "model_path": str(model_folder),
        "host": host,
        "tp_size": section.rollout_num_gpus_per_engine,
        "random_seed": seed,
        "mem_fraction_static": section.sglang_mem_fraction_static,
        "enable_memory_saver": memory_saver,
        "enable_return_routed_experts": routes,
        **section.sglang_options,
    }
    python = section.sglang_python or sys.executable
    return lambda port: [python, "-m", "sglang.launch_server", *as_arguments({**arguments, "port": port})]


def server_environment(environment: Mapping[str, str], *, other_python: bool = False) -> dict[str, str]:
    """A worker's environment without what is meant for the training processes alone, and without what would make the
    server another one than its command line says; crash dumps only where it asks.

    `other_python`: the server runs in a Python environment of its own.
    """
    left_out = {*OTHER_ALLOCATOR, *OTHER_SERVER, *(PACKAGES_OF_HERE if other_python else ())}
    kept = {n: v for n, v in environment.items() if n not in left_out and not n.startswith(MEMORY_SAVER)}
    return NO_CRASH_DUMPS | kept


class LocalServer:
    """A server of this run. It ends with this process, also after a kill."""

    def __init__(
        self,
        command: Callable[[int], list[str]],
        log_file: Path,
        *,
        host: str = "127.0.0.1",
        environment: Mapping[str, str],
        start_seconds: float = START_SECONDS,
    ) -> None:
        """`command` makes the command line for a port; to `log_file` everything the server prints is appended."""
        self._host = host
        self._choose_port()
        self._command = command
        self.log_file = log_file
        # A server's first request is one to itself, which a proxy would take elsewhere.
        direct = ",".join(filter(None, (environment.get("no_proxy", environment.get("NO_PROXY")), host)))
        self._environment = {**environment, "no_proxy": direct, "NO_PROXY": direct}
        self._start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._was_ready = False

    def start(self) -> None:
        """Start the server and wait until it generates; `address` is settled once it has.
        Raises RunError: it ended while it was starting, or is not ready in time."""
        for tries_left in reversed(range(PORT_TRIES)):
            try:
                return self._start()
            except ServerDied:
                if self._was_ready or not tries_left or not PORT_TAKEN.search(self.tail()):
                    raise
                log.warning("the port of SGLang server %s was taken while it loaded: trying another", self.address)
                self._choose_port()

    def _choose_port(self) -> None:
        self.port = lasting_port(self._host)
        self.address = f"[{self._host}]:{self.port}" if ":" in self._host else f"{self._host}:{self.port}"

    def _start(self) -> None:
        assert not self.alive(), "the server runs already"
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, *self._command(self.port)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                # Away from the terminal's Ctrl-C, but in the session by which a run finds what it has started.
                process_group=0,
            )
        try:
            self._wait_until_ready()
            self._was_ready = True
        except BaseException:
            self.stop()
            raise

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def ends_within(self, seconds: float) -> bool:
        """Whether the process has ended, or does so in this time."""
        if self._process is None:
            return True
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        """End the server, by force if need be; safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("SGLang server %s does not end: killing it", self.address)
            process.kill()
            process.wait()

    def died(self, doing: str) -> ServerDied:
        """The error of a server that ended by itself."""
        code = self._process.poll() if self._process is not None else None
        return ServerDied(self._problem(DIED, f"ended {doing}, exit code {code}", "a server that keeps running"))

    def tail(self) -> str:
        """What the log says of this start's end: its last error, wherever that is, and the last lines."""
        with self.log_file.open("rb") as lines:
            lines.seek(max(self._log_start, self.log_file.stat().st_size - TAIL_BYTES))
            text = lines.read().decode(errors="replace")
        said = [line for line in text.splitlines() if line.strip()]
        errors = [line for line in said[:-TAIL_LINES] if ERROR_LINE.search(line)]
        return "\n".join([*errors[-1:], *said[-TAIL_LINES:]])

    def _wait_until_ready(self) -> None:
        client = SglangClient(self.address)
        deadline = time.monotonic() + self._start_seconds
        while time.monotonic() < deadline:
            if not self.alive():
                raise self.died("while it was starting")
            try:
                client.request("GET", "/health_generate", timeout=HEALTH_SECONDS)
                return
            except StatusFault as starting:
                if starting.status != 503:
                    raise
            except (ConnectionFault, DeadlineFault):
                pass  # It listens only after the model is loaded.
            time.sleep(POLL_SECONDS)
        expected = f"an answer within {self._start_seconds:g} s of its start"
        raise RunError(self._problem(SLOW, "is not ready", expected))

    def _problem(self, kind: ProblemKind, what: str, expected: str) -> Problem:
        message, log_file = f"SGLang server {self.address} {what}", self.log_file
        return kind(message, where=str(log_file), got=self.tail(), expected=expected, fix=f"tail -n 60 {log_file}")
