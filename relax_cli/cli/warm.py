"""The commands' side of the warm process: whether there is one, and a run in a fork of it."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from relax_cli.cli.console import Output
from relax_cli.engine import fork_client
from relax_cli.engine.fork_client import SOCKET
from relax_cli.models.packages import default_cache_dir


def warm_folder() -> Path:
    """Where the warm process listens and logs."""
    return default_cache_dir(os.environ) / "warm"


def reach() -> socket.socket | None:
    """A connection to the warm process, if there is one."""
    folder = warm_folder()
    return fork_client.connect(str(folder), SOCKET) if (folder / SOCKET).exists() else None


def tell(do: str) -> dict[str, Any]:
    """Its answer: `pid`, its `runs`, and why it does not fit this shell; empty without a warm process."""
    channel = reach()
    if channel is None:
        return {}
    with channel:
        return fork_client.ask(channel, fork_client.process_state() | {"do": do})


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
