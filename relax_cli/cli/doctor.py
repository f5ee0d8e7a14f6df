"""`relax doctor`: whether this machine can run relax."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from relax_cli.cli.console import Format, FormatOption, output_of
from relax_cli.config.redact import scrubbed
from relax_cli.errors import ExitCode

if TYPE_CHECKING:
    from relax_cli.plugin.manager import Plugins

Timeout = Annotated[float, typer.Option("--timeout", min=1, help="seconds that one part may take to import")]


def register(app: typer.Typer, plugins: Plugins) -> None:
    """Add the command to an application."""

    @app.command("doctor")
    def doctor(ctx: typer.Context, timeout: Timeout = 180.0, fmt: FormatOption = Format.TEXT) -> None:
        """Check this machine: versions, imports, devices, memory, disk, plugins. Exit code 0, or 4 with problems."""
        # Here, because what it imports would slow every other command down.
        from relax_cli.cli.doctor_checks import as_text, examine_machine

        output = output_of(ctx, fmt)
        with output.err.status("importing every part in a process of its own"):
            checks = examine_machine(plugins, timeout)
        ok = all(check.status != "problem" for check in checks)
        data = [{name: scrubbed(text) for name, text in asdict(check).items()} for check in checks]
        output.result({"ok": ok, "checks": data}, as_text(checks))
        raise typer.Exit(ExitCode.OK if ok else ExitCode.ENVIRONMENT)
