"""The JSON schema of recipes, for editors."""

from __future__ import annotations

from typing import Any

from relax_cli.config.model import section_model
from relax_cli.config.schema import Config

VARIABLE = {"type": "string", "pattern": r"\$\{.+\}"}
"""What may stand in a recipe for a value that is not text."""


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
