"""The options as documents: `docs/configuration.md`, and a JSON schema for editors of recipes. Both from the schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from relax_cli.config.model import base_type, choices, flag, is_optional, section_model
from relax_cli.config.schema import Config

INTRODUCTION = """\
# Configuration

Every option of `relax train` and `relax validate-config`. This page is written by `python scripts/make_docs.py` from
`relax_cli/config/schema.py` and the option models of the built-in estimators; a test checks that it is current.

An option `batch.rollout_batch_size` is

- the flag `--rollout-batch-size 32` (`--x` and `--no-x` for what is on or off),
- the recipe key `batch: {rollout_batch_size: 32}`,
- `--set batch.rollout_batch_size=32`,
- the environment variable `RELAX_ROLLOUT_BATCH_SIZE=32`.

Later ones win: default < recipes, left to right < environment < `--set` < flags. `relax validate-config --show-origin`
shows where each value came from.

A later layer also ends what earlier ones say against it: `--custom-rm-path` replaces a recipe's `rm_type`,
`--num-epoch` its `num_rollout`, `--micro-batch-size` its token budget, `--advantage-estimator grpo` its options of PPO
and the critic (`relax_cli/config/replaced.py` has the list).
`null` unsets an option: `--set reward.rm_type=null`, `RELAX_SAVE=null`, or `--critic-lr null` for an option with one
value.

In options that are paths, `~` and `$VAR` are expanded in every layer.

Recipes are sparse YAML 1.2: only what differs from the defaults. `${VAR}` and `${VAR:-default}` expand,
`${RECIPE_DIR}` is the folder of the recipe, `$${` is a plain `${`. An unknown key, a key that stands twice or a
variable that is not set is an error with file and line. `relax recipes schema` prints a JSON schema for editors.

The `config.json` of a run folder is also a recipe, without its `run_dir`: `relax train --recipe RUN/config.json` runs
it again in a new folder. It also records the command line and the versions of the libraries.

What must hold between options is in [rules.md](rules.md).

Secrets are never printed or written: values of options that are named like one (`…_key`, `…_token`, `…password…`,
`…secret…`), passwords in URLs, and tokens in their queries show as `<redacted>`. In the command that continues a run, a
variable like `${RELAX_RM_URL:?…}` stands for the option's value, and the shell says so where it is not set.
"""

KINDS = {bool: "on/off", int: "integer", float: "number", str: "text", tuple: "list of text", dict: "JSON object"}
LIMITS = (("ge", ">= "), ("gt", "> "), ("le", "<= "), ("lt", "< "))
VARIABLE = {"type": "string", "pattern": r"\$\{.+\}"}
"""What may stand in a recipe for a value that is not text."""


def configuration_markdown(model: type[Config]) -> str:
    """`docs/configuration.md`."""
    return "\n".join([INTRODUCTION, *(line for section in model.model_fields for line in _section(model, section))])


def recipe_schema(model: type[Config]) -> dict[str, Any]:
    """JSON schema (2020-12) of a recipe: everything may be left out, and `${VAR}` may stand for any value."""
    schema = model.model_json_schema()
    for body in schema["$defs"].values():
        body["properties"] = {name: _or_variable(value) for name, value in body["properties"].items()}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "relax recipe"
    schema["properties"] = {
        name: {"anyOf": [{"$ref": value["$ref"]}, {"type": "null"}], "description": _summary(model, name)}
        for name, value in schema["properties"].items()
    }
    return schema


def _section(model: type[Config], section: str) -> Iterator[str]:
    yield f"## {section}"
    yield ""
    yield f"{_summary(model, section)}."
    yield ""
    yield "| option | type | default | |"
    yield "|---|---|---|---|"
    for name, field in section_model(model, section).model_fields.items():
        cells = (f"`{flag(name)}`", _kind(field), _default(field), field.description or "")
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _summary(model: type[Config], section: str) -> str:
    return (section_model(model, section).__doc__ or "").strip().splitlines()[0].rstrip(".")


def _kind(field: FieldInfo) -> str:
    if allowed := choices(field):
        return ", ".join(f"`{name}`" for name in allowed)
    limits = [
        f"{sign}{getattr(item, name):g}" for item in field.metadata for name, sign in LIMITS if hasattr(item, name)
    ]
    return " ".join([KINDS[base_type(field)], *([", ".join(limits)] if limits else [])])


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value in (None, "", ()):
        return "unset" if is_optional(field) or value == "" else "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return ", ".join(f"`{role}` {list(counts)}" for role, counts in value.items())
    return f"`{value}`"


def _or_variable(value: dict[str, Any]) -> dict[str, Any]:
    kept = {name: part for name, part in value.items() if name in ("description", "default")}
    kind = {name: part for name, part in value.items() if name not in ("description", "default", "title")}
    if kind.get("type") == "string" and "enum" not in kind:
        return {**kind, **kept}
    alternatives = kind["anyOf"] if set(kind) == {"anyOf"} else [kind]
    # A single text stands for a list of one.
    text = {"type": "string"} if any(part.get("type") == "array" for part in alternatives) else VARIABLE
    return {"anyOf": [*alternatives, text], **kept}
