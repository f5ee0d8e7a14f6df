"""`relax recipes`: the configurations that ship with relax, and the JSON schema of all recipes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from relax_cli.cli.console import Format, Output, output_of
from relax_cli.config.model import section_model
from relax_cli.config.recipes import bundled_recipes, describe, find_recipe
from relax_cli.config.schema import Config
from relax_cli.config.text import table
from relax_cli.plugin.config_model import config_model
from relax_cli.plugin.manager import load_plugins

VARIABLE = {"type": "string", "pattern": r"\$\{.+\}"}
"""What may stand in a recipe for a value that is not text."""

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="a bundled recipe, or a file", autocompletion=lambda: list(bundled_recipes())),
]


def list_recipes(output: Output) -> None:
    """List the bundled recipes."""
    rows = [(name, describe(path)) for name, path in bundled_recipes().items()]
    data = [{"name": name, "summary": summary} for name, summary in rows]
    output.result(data, table(("name", "summary"), rows))


def show_recipe(name: Name) -> None:
    """Print a recipe."""
    Output().result(None, find_recipe(name).read_text("utf-8").rstrip())


def print_schema(ctx: typer.Context) -> None:
    """Print the JSON schema of recipes, for editors; with the options of the installed plugins."""
    output_of(ctx, Format.JSON).result(recipe_schema(config_model(load_plugins().estimators().values())), "")


SUB_COMMANDS = {"list": list_recipes, "show": show_recipe, "schema": print_schema}


def recipe_schema(model: type[Config]) -> dict[str, Any]:
    """JSON schema (2020-12) of a recipe: everything may be left out, and `${VAR}` may stand for any value."""
    schema = model.model_json_schema()
    for body in schema["$defs"].values():
        body["properties"] = {name: _or_variable(value) for name, value in body["properties"].items()}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "relax recipe"
    schema["properties"] = {
        name: {"anyOf": [{"$ref": value["$ref"]}, {"type": "null"}], "description": summary_of(model, name)}
        for name, value in schema["properties"].items()
    }
    return schema


def _or_variable(value: dict[str, Any]) -> dict[str, Any]:
    kept = {name: part for name, part in value.items() if name in ("description", "default")}
    kind = {name: part for name, part in value.items() if name not in ("description", "default", "title")}
    if kind.get("type") == "string" and "enum" not in kind:
        return {**kind, **kept}
    alternatives = kind["anyOf"] if set(kind) == {"anyOf"} else [kind]
    # A single text stands for a list of one.
    text = {"type": "string"} if any(part.get("type") == "array" for part in alternatives) else VARIABLE
    return {"anyOf": [*alternatives, text], **kept}


def summary_of(model: type[Config], section: str) -> str:
    """What a section is about, without a full stop."""
    return (section_model(model, section).__doc__ or "").strip().splitlines()[0].rstrip(".")
