"""Recipes: sparse YAML 1.2 files of `section: {key: value}`, read with the line of every value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from relax_cli.config.model import options_by_name, section_model
from relax_cli.config.schema import Config
from relax_cli.errors import ConfigError, Problem

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


def nearest(name: str, candidates: Iterable[str]) -> str:
    """The candidate spelt most like `name`, or an empty string."""
    return next(iter(difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)), "")


def bundled_recipes() -> dict[str, Path]:
    """Recipes shipped with relax, by name."""
    folder = Path(__file__).parent.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """The file of a bundled recipe NAME, or of a FILE path (anything with a suffix or a folder).

    Raises:
        ConfigError: there is no such recipe.
    """
    bundled = bundled_recipes()
    if name in bundled:
        return bundled[name]
    path = Path(name)
    if path.is_file():
        return path
    guess = nearest(name, bundled)
    fix = f"use --recipe {guess}" if guess else "list the bundled ones with `relax recipes list`"
    raise ConfigError(
        Problem(
            id="recipe-not-found",
            message=f"there is no recipe {name!r}",
            fix=fix,
            option="--recipe",
            where="--recipe",
            got=name,
            expected=f"a file, or one of {', '.join(bundled)}" if bundled else "a file",
        )
    )


def describe(path: Path) -> str:
    """The first comment line of a recipe."""
    first = next((line for line in path.read_text("utf-8").splitlines() if line.startswith("#")), "")
    return first.lstrip("# ").rstrip()


def read_recipe(path: Path, env: Mapping[str, str], model: type[Config]) -> tuple[list[Setting], list[Problem]]:
    """The settings of a recipe file and everything that is wrong with it."""
    try:
        document = YAML().load(path.read_text("utf-8"))
    except (MarkedYAMLError, YAMLError, UnicodeDecodeError, OSError) as error:
        return [], [_unreadable(path, error)]
    if document is None:
        return [], []
    if not isinstance(document, CommentedMap):
        message = f"recipe {path} is not a mapping of sections"
        return [], [_recipe_problem("recipe-syntax", f"{path}:1", message, "write `section:` and indented keys")]
    settings: list[Setting] = []
    problems: list[Problem] = []
    variables = {**env, "RECIPE_DIR": str(path.parent)}
    for section, body in document.items():
        where = f"{path}:{document.lc.key(section)[0] + 1}"
        if section not in model.model_fields:
            problems.append(_unknown_section(str(section), where, model))
        elif body is None:
            continue
        elif not isinstance(body, CommentedMap):
            message = f"section {section} holds a single value instead of keys"
            problems.append(_recipe_problem("recipe-syntax", where, message, f"indent keys under `{section}:`"))
        else:
            found, bad = _read_section(str(section), body, path, variables, model)
            settings += found
            problems += bad
    return settings, problems


def _read_section(
    section: str, body: CommentedMap, path: Path, variables: Mapping[str, str], model: type[Config]
) -> tuple[list[Setting], list[Problem]]:
    settings: list[Setting] = []
    problems: list[Problem] = []
    known = section_model(model, section).model_fields
    for key, raw in body.items():
        where = f"{path}:{body.lc.key(key)[0] + 1}"
        if key not in known:
            problems.append(unknown_key(section, str(key), where, model))
            continue
        value = plain(raw)
        expanded = _expand(value, where, variables, problems)
        settings.append(Setting(section, key, expanded, where, is_text=isinstance(value, str) and expanded != value))
    return settings, problems


def unknown_key(section: str, key: str, where: str, model: type[Config]) -> Problem:
    """The problem of a key that its section does not have, with the nearest valid place."""
    everywhere = {name: owner for name, (owner, _) in options_by_name(model).items()}
    in_section = nearest(key, section_model(model, section).model_fields)
    guess = key if key in everywhere else in_section or nearest(key, everywhere)
    if guess:
        fix = f"use {everywhere[guess]}.{guess}"
    else:
        fix = f"keys of {section}: {', '.join(section_model(model, section).model_fields)}"
    message = f"section {section} has no key {key!r}"
    return Problem(id="unknown-key", message=message, fix=fix, where=where, got=f"{section}.{key}", expected=guess)


def plain(value: Any) -> Any:
    """ruamel's round-trip types as ordinary Python values."""
    if isinstance(value, dict):
        return {plain(k): plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


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
            problems.append(_recipe_problem("recipe-variable", where, message, "write ${NAME} or ${NAME:-default}"))
        elif variables.get(name) or (default is None and name in variables):
            return variables[name]
        elif default is not None:
            return default[2:]
        else:
            message = f"variable {name} is not set"
            fix = f"export {name}=…, or write ${{{name}:-default}} in the recipe"
            problems.append(_recipe_problem("recipe-variable", where, message, fix))
        return match[0]

    return _VARIABLE.sub(replace, value)


def _unreadable(path: Path, error: Exception) -> Problem:
    if isinstance(error, MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        reason = str(error.problem or error.context).partition(" with value")[0]
        if isinstance(error, DuplicateKeyError):
            return _recipe_problem(
                "duplicate-key", where, f"recipe has a {reason.removeprefix('found ')}", "keep one of the two"
            )
        return _recipe_problem("recipe-syntax", where, f"recipe is not valid YAML: {reason}", "correct this line")
    return _recipe_problem("recipe-syntax", str(path), f"recipe cannot be read: {error}", "give a UTF-8 YAML file")


def _unknown_section(section: str, where: str, model: type[Config]) -> Problem:
    owner = options_by_name(model).get(section)
    guess = nearest(section, model.model_fields)
    if owner is not None:
        fix = f"put {section} under `{owner[0]}:`"
    elif guess:
        fix = f"use `{guess}:`"
    else:
        fix = f"sections: {', '.join(model.model_fields)} (an estimator's section needs its plugin installed)"
    return Problem(
        id="unknown-section",
        message=f"there is no section {section!r}",
        fix=fix,
        where=where,
        got=section,
        expected=guess,
    )


def _recipe_problem(rule: str, where: str, message: str, fix: str) -> Problem:
    return Problem(id=rule, message=message, fix=fix, where=where, option="--recipe")
