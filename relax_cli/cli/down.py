"""`relax down`: end the warm process of `relax up`."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

from relax_cli.cli.console import Format, FormatOption, output_of
from relax_cli.cli.warm import reach, warm_folder
from relax_cli.engine import fork_client

if TYPE_CHECKING:
    from relax_cli.plugin.manager import Plugins


def register(app: typer.Typer, plugins: Plugins) -> None:
    """Add the command to an application."""

    @app.command("down")
    def down(ctx: typer.Context, fmt: FormatOption = Format.TEXT) -> None:
        """End the warm process."""
        output = output_of(ctx, fmt)
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
            wait_for_end(found["pid"])
        output.result({"ok": True, "pid": found["pid"], "runs": found["runs"]}, text)


def wait_for_end(pid: int) -> None:
    """Until a process that is not a child of this one has ended."""
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        select.select([handle], [], [], fork_client.PATIENCE)
        os.close(handle)
