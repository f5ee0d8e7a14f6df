"""`relax plugins`: what is installed, and what is broken."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from relax_cli.cli.console import Format, Output, table

if TYPE_CHECKING:
    from relax_cli.plugin.manager import Plugins

FormatOption = Annotated[Format, typer.Option("--format", help="form of the data on stdout")]


def plugins_app(plugins: Plugins) -> typer.Typer:
    """The sub-commands of `relax plugins`."""
    app = typer.Typer(no_args_is_help=True, help="Estimator and reward plugins.")

    @app.callback()
    def group() -> None:
        """Estimator and reward plugins."""

    @app.command("list")
    def list_plugins(ctx: typer.Context, fmt: FormatOption = Format.TEXT) -> None:
        """List every plugin found, broken ones with the reason."""
        output = Output(fmt)
        ctx.find_root().obj = output
        rows = [asdict(row) for row in plugins.rows()]
        columns = ("name", "kind", "distribution", "version", "status", "reason")
        text = table(columns, [[str(row[c] or "") for c in columns] for row in rows])
        output.result(rows, text)

    return app
