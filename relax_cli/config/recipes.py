"""Recipes: sparse YAML 1.2 files of `section: {key: value}`, read with the line of every value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml.comments import CommentedMap

from relax_cli.config.documents import SYNTAX, THEME, TOO_LARGE, TooLarge, line_of, plain, read_document
from relax_cli.config.model import flag, options_by_name, section_model
from relax_cli.config.names import done_otherwise, meant_option, nearest, same_option
from relax_cli.config.redact import HIDDEN
from relax_cli.config.schema import Config
from relax_cli.errors import ConfigError, Problem, problem_kinds

declare = problem_kinds(THEME)
NOT_FOUND = declare("recipe-not-found", "`--recipe` names neither a bundled recipe nor a file.", option="--recipe")
VARIABLE = declare(
    "recipe-variable",
    "A `${VAR}` of the recipe is not set and has no `:-default`, or is not well-formed.",
    option="--recipe",
)
UNKNOWN_SECTION = declare(
    "unknown-section",
    "There is no section of that name. An estimator's own section exists only while its plugin is installed.",
)
UNKNOWN_KEY = declare(
    "unknown-key", "The section has no such key; the nearest valid one, or the section it belongs to, is given."
)

SECRET_LEFT_OUT = declare(
    "recipe-secret",
    "The recipe is the `config.json` of a run, in which secrets are `<redacted>`; the option has to be given again.",
)
RUN_RECORD = frozenset({"config", "origins"})
"""Keys by which the `config.json` of a run is known."""

_VARIABLE = re.compile(r"\$(?P<escape>\$)?\{(?P<name>[^}:]*)(?P<default>:-[^}]*)?(?P<rest>[^}]*)(?P<close>\})?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Setting:
    """One value of one layer."""

    section: str
    key: str
    value: Any
    where: str
    """Origin shown to the user: `FILE:LINE`, `RELAX_LR`, `--set` or the flag."""
    is_text: bool
    """The value is text still to be read as YAML (environment, `--set`, expanded variables)."""
    layer: int = 0
    """Recipes count from 0, then the environment, `--set`, flags."""
    problems: tuple[Problem, ...] = ()
    """Why the value cannot be known, such as a variable that is not set. A later layer that replaces it ends them."""


def bundled_recipes() -> dict[str, Path]:
    """Recipes shipped with relax, by name."""
    folder = Path(__file__).parent.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """The file of a bundled recipe NAME, or of a FILE path (anything with a suffix or a folder).
    Raises ConfigError: there is no such recipe."""
    bundled = bundled_recipes()
    if name in bundled:
        return bundled[name]
    path = Path(name)
    if path.is_file():
        return path
    guess = nearest(name, bundled)
    fix = f"use --recipe {guess}" if guess else "list the bundled ones with `relax recipes list`"
    expected = f"a file, or one of {', '.join(bundled)}" if bundled else "a file"
    raise ConfigError(NOT_FOUND(f"there is no recipe {name!r}", fix=fix, where="--recipe", got=name, expected=expected))


def describe(path: Path) -> str:
    """The first comment line of a recipe."""
    first = next((line for line in path.read_text("utf-8").splitlines() if line.startswith("#")), "")
    return first.lstrip("# ").rstrip()


def read_recipe(path: Path, env: Mapping[str, str], model: type[Config]) -> tuple[list[Setting], list[Problem]]:
    """The settings of a recipe file and everything that is wrong with it."""
    try:
        document = read_document(path)
    except ConfigError as error:
        return [], list(error.problems)
    if document.keys() >= RUN_RECORD:
        return _read_record(document["config"], path, model)
    settings: list[Setting] = []
    problems: list[Problem] = []
    variables = {**env, "RECIPE_DIR": str(path.parent)}
    for section, body in document.items():
        where = line_of(document, section, path)
        if section not in model.model_fields:
            problems.append(_unknown_section(str(section), where, model))
        elif isinstance(body, CommentedMap):
            known = section_model(model, section).model_fields
            for key, raw in body.items():
                where = line_of(body, key, path)
                if key in known:
                    settings.append(_setting(section, key, raw, where, variables))
                else:
                    problems.append(unknown_key(section, str(key), where, model))
        elif body is not None:
            message = f"section {section} is a single value instead of keys"
            problems.append(SYNTAX(message, where=where, fix=f"indent keys under `{section}:`"))
    return settings, problems


def _read_record(config: Any, path: Path, model: type[Config]) -> tuple[list[Setting], list[Problem]]:
    """The settings of a run's `config.json`: what differs from the defaults, without its folder, which is its own."""
    settings: list[Setting] = []
    problems: list[Problem] = []
    sections = config if isinstance(config, CommentedMap) else CommentedMap()
    defaults = model().model_dump(mode="json")
    for section, body in sections.items():
        for key, raw in body.items() if isinstance(body, CommentedMap) and section in defaults else ():
            where, value = line_of(body, key, path), plain(raw)
            if key not in defaults[section]:
                problems.append(unknown_key(section, key, where, model))
            elif HIDDEN in json.dumps(value, default=str):
                message = f"{section}.{key} had a secret, which config.json does not keep"
                fix = f"give {flag(key)} after --recipe"
                secret = SECRET_LEFT_OUT(message, fix=fix, option=flag(key), where=where)
                settings.append(Setting(section, key, value, where, is_text=False, problems=(secret,)))
            # A run with a number of rollouts has it from its passes over the data, if those were given.
            elif key not in ("run_dir", "num_epoch") and value != defaults[section][key]:
                settings.append(Setting(section, key, value, where, is_text=False))
    return settings, problems


def _setting(section: str, key: str, raw: Any, where: str, variables: Mapping[str, str]) -> Setting:
    problems: list[Problem] = []
    try:
        value = plain(raw)
    except TooLarge as error:
        large = TOO_LARGE(f"{section}.{key} has {error}", where=where, fix="write the value out, without aliases")
        return Setting(section, key, None, where, is_text=False, problems=(large,))
    expanded = _expand(value, where, variables, problems)
    is_text = isinstance(value, str) and expanded != value
    return Setting(section, key, expanded, where, is_text, problems=tuple(problems))


def unknown_key(section: str, key: str, where: str, model: type[Config]) -> Problem:
    """The problem of a key that its section does not have, with the nearest valid place."""
    everywhere = {name: owner for name, (owner, _) in options_by_name(model).items()}
    guess = meant_option(key, everywhere)
    if guess:
        fix = f"use {everywhere[guess]}.{guess}"
    else:
        fix = done_otherwise(key) or f"keys of {section}: {', '.join(section_model(model, section).model_fields)}"
    message = f"section {section} has no key {key!r}"
    return UNKNOWN_KEY(message, fix=fix, where=where, got=f"{section}.{key}", expected=guess)


def _expand(value: Any, where: str, variables: Mapping[str, str], problems: list[Problem]) -> Any:
    """`${VAR}` and `${VAR:-default}` in every string of a value; `$${` stands for a literal `${`."""
    if isinstance(value, dict):
        return {k: _expand(v, where, variables, problems) for k, v in value.items()}
    if isinstance(value, list):
        return [_expand(v, where, variables, problems) for v in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        if match["escape"]:
            return match[0][1:]
        name, default = match["name"], match["default"]
        if not _NAME.fullmatch(name) or match["rest"] or not match["close"]:
            message = f"{match[0]} is not a variable"
            problems.append(VARIABLE(message, where=where, fix="write ${NAME} or ${NAME:-default}"))
        elif variables.get(name) or (default is None and name in variables):
            return variables[name]
        elif default is not None:
            return default[2:]
        else:
            message = f"variable {name} is not set"
            fix = f"export {name}=…, or write ${{{name}:-default}} in the recipe"
            problems.append(VARIABLE(message, where=where, fix=fix))
        return match[0]

    return _VARIABLE.sub(replace, value)


def _unknown_section(section: str, where: str, model: type[Config]) -> Problem:
    options = options_by_name(model)
    guess = nearest(section, model.model_fields)
    option = same_option(section, options) or ("" if guess else meant_option(section, options))
    fix = f"sections: {', '.join(model.model_fields)} (an estimator's section needs its plugin installed)"
    if option or guess:
        fix = f"put {option} under `{options[option][0]}:`" if option else f"use `{guess}:`"
    return UNKNOWN_SECTION(f"there is no section {section!r}", fix=fix, where=where, got=section, expected=guess)
