"""`relax up` and `relax down`: a process that has imported what runs need, for the next minutes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from relax_cli.cli.console import Output
from relax_cli.cli.warm import reach, tell, warm_folder
from relax_cli.engine import fork_client
from relax_cli.errors import MACHINE_THEME, EnvironmentFault, Problem, problem_kind

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
    found = tell("look")
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
    """Start the warm process; returns what it says of itself.

    Raises:
        EnvironmentFault: it does not come up.
    """
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
    channel = reach()
    if channel is None:
        output.result({"ok": True, "pid": None, "runs": []}, "No warm process is up.")
        return
    with channel:
        found = fork_client.ask(channel, fork_client.process_state() | {"do": "end"})
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
