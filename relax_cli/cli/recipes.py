"""`relax recipes`: the configurations that ship with relax."""

from __future__ import annotations

from typing import Annotated

import typer

from relax_cli.cli.console import Format, FormatOption, Output, output_of, table
from relax_cli.cli.help import CommandGroup
from relax_cli.config.recipes import bundled_recipes, describe, find_recipe
from relax_cli.plugin.manager import Plugins, load_plugins

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Recipes: ready configurations for `relax train --recipe`."
)

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="a bundled recipe, or a file", autocompletion=lambda: list(bundled_recipes())),
]


@app.command("list")
def list_recipes(ctx: typer.Context, fmt: FormatOption = Format.TEXT) -> None:
    """List the bundled recipes."""
    output = output_of(ctx, fmt)
    rows = [(name, describe(path)) for name, path in bundled_recipes().items()]
    data = [{"name": name, "summary": summary} for name, summary in rows]
    output.result(data, table(("name", "summary"), rows))


@app.command("show")
def show_recipe(name: Name) -> None:
    """Print a recipe."""
    Output().result(None, find_recipe(name).read_text("utf-8").rstrip())


@app.command("schema")
def recipe_schema(ctx: typer.Context) -> None:
    """Print the JSON schema of recipes, for editors; with the options of the installed plugins."""
    from relax_cli.cli.recipe_schema import recipe_schema as schema
    from relax_cli.plugin.config_model import config_model

    output_of(ctx, Format.JSON).result(schema(config_model(load_plugins().estimators().values())), "")


def register(parent: typer.Typer, plugins: Plugins) -> None:
    """Add the sub-commands of `relax recipes` to an application."""
    parent.add_typer(app, name="recipes")
