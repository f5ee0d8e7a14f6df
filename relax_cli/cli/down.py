"""`relax down`: end the warm process of `relax up`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from relax_cli.cli.console import Format, FormatOption, output_of
from relax_cli.cli.warm import reach
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
            text = f"Process {found.get('pid')} ends with its last run: {found.get('runs')}."
            if not found.get("runs"):
                fork_client.read_line(channel)  # Its end.
                text = "The warm process has ended."
        output.result({"ok": True, "pid": found.get("pid"), "runs": found.get("runs")}, text)
