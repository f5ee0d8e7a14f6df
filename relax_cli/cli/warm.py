"""The warm process of `relax up` and `relax down`, and a run in a fork of it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from relax_cli.cli.console import Output
from relax_cli.engine import fork_client
from relax_cli.engine.fork_client import SOCKET
from relax_cli.errors import MACHINE_THEME, EnvironmentFault, Problem, problem_kind
from relax_cli.models.packages import default_cache_dir

START_SECONDS = 180.0
"""A loaded machine needs a minute for the imports."""

NOT_WARM = problem_kind(
    "warm-not-started", MACHINE_THEME, "`relax up` could not start its warm process. Runs start without one as ever."
)
OUTDATED = problem_kind(
    "warm-outdated",
    MACHINE_THEME,
    "The warm process of `relax up` was started from other versions, files or settings. No run uses it.",
)
IdleMinutes = Annotated[float, typer.Option("--idle-minutes", min=0.01, help="minutes without a run until it ends")]


def up(output: Output, idle_minutes: IdleMinutes = 30.0) -> None:
    """Start a warm process, from which later runs start in less than half the time."""
    found = tell("look") or {}
    if found.get("refused"):
        raise EnvironmentFault(
            OUTDATED(
                "a warm process that does not fit is up",
                where=f"process {found['pid']}",
                got=found["refused"],
                expected="what it was started with",
                fix="relax down && relax up",
            )
        )
    if not found:
        with output.err.status("importing what runs need"):
            found = start(warm_folder(), idle_minutes)
    output.result(
        {"ok": True, "pid": found["pid"], "runs": found["runs"]},
        f"Warm: process {found['pid']}. The commands train, quickstart and eval start from it, until it has been "
        "idle for its minutes. To end it:\n  relax down",
    )


def start(folder: Path, idle_minutes: float) -> dict[str, Any]:
    """Start the warm process; returns what it says of itself. Raises EnvironmentFault: it does not come up."""
    if sys.platform != "linux":
        raise EnvironmentFault(_not_warm(sys.platform, "Linux", "start runs without it"))
    from relax_cli.engine.build import cpu_environment
    from relax_cli.preflight.machine import usable_cores

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    log = folder / "log"
    # numpy's own threads, which it starts when it is imported, would not be there in a fork.
    environment = os.environ | cpu_environment(usable_cores()) | {"OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "relax_cli.engine.forks", str(folder), str(60 * idle_minutes)]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps(fork_client.process_state()).encode() + b"\n")
    process.stdin.close()
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if found := tell("look"):
            return found
        time.sleep(0.05)
    process.kill()
    lines = log.read_text("utf-8").splitlines() or ["nothing in its log"]
    raise EnvironmentFault(_not_warm(lines[-1][:300], "a process that listens", f"tail -n 40 {log}"))


def _not_warm(got: str, expected: str, fix: str) -> Problem:
    return NOT_WARM("the warm process did not start", where=str(warm_folder()), got=got, expected=expected, fix=fix)


def down(output: Output) -> None:
    """End the warm process."""
    found = tell("end")
    if found is None:
        output.result({"ok": True, "pid": None, "runs": []}, "No warm process is up.")
        return
    text = "The warm process has ended."
    if not found:
        pid = int((warm_folder() / fork_client.LOCK).read_text("utf-8"))
        os.kill(pid, signal.SIGKILL)
        found, text = {"pid": pid, "runs": []}, "The warm process did not answer, and was killed."
    if found["runs"]:
        text = f"The warm process ends with its last run; their processes: {', '.join(map(str, found['runs']))}."
    else:
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(found["pid"])  # It is not a child of this process.
            select.select([handle], [], [], fork_client.PATIENCE)
            os.close(handle)
    output.result({"ok": True, "pid": found["pid"], "runs": found["runs"]}, text)


def warm_folder() -> Path:
    """Where the warm process listens and logs."""
    return default_cache_dir(os.environ) / "warm"


def reach() -> socket.socket | None:
    """A connection to the warm process, if there is one."""
    folder = warm_folder()
    return fork_client.connect(str(folder), SOCKET) if (folder / SOCKET).exists() else None


def tell(do: str) -> dict[str, Any] | None:
    """Its answer: `pid`, its `runs`, and why it does not fit this shell; empty without one, None without a process."""
    if channel := reach():
        with channel:
            return fork_client.ask(channel, fork_client.process_state() | {"do": do})
    return None


def run_warm(words: list[str]) -> int | None:
    """The exit code of `relax WORDS` in a fork of the warm process; None where there is none that fits."""
    if os.environ.get("RELAX_WARM") == "0" or fork_client.is_fork():
        return None
    channel = reach()
    if channel is None:
        if (socket_file := warm_folder() / SOCKET).exists():
            Output().note("the warm process of relax up was killed: this run starts without it; another one: relax up")
            socket_file.unlink(missing_ok=True)
        return None
    with channel:
        answer = fork_client.start(channel, [sys.argv[0], *words])
        if not answer.get("pid"):
            why = answer.get("refused") or "it does not answer"
            Output().note(f"not started from the warm process: {why}; renew it: relax down && relax up")
            return None
        status = fork_client.wait(channel, answer["pid"])
    if status is None:
        Output().note("the warm process of relax up was killed, and this run with it")
    return fork_client.end_like(status)
