"""Recipes: sparse YAML 1.2 files of `section: {key: value}`, read with the line of every value."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError

from relax_cli.config.model import flag, options_by_name, section_model
from relax_cli.config.names import done_otherwise, meant_option, nearest, same_option
from relax_cli.config.redact import HIDDEN
from relax_cli.config.schema import Config
from relax_cli.errors import ConfigError, Problem, problem_kinds

THEME = "Reading the configuration"
MOST_BYTES = 128 << 10
MOST_LEVELS = 20
MOST_VALUES = 10_000
MOST_BITS = 64

declare = problem_kinds(THEME, option="--recipe")
SYNTAX = declare(
    "recipe-syntax", "The recipe is not a YAML mapping of sections with indented keys. The place is file and line."
)
DUPLICATE_KEY = declare(
    "duplicate-key", "A key stands twice in one section of a recipe. YAML readers would silently take the last one."
)
TOO_LARGE = declare(
    "recipe-limit",
    f"A recipe has at most {MOST_BYTES >> 10} KiB, and one of its values at most {MOST_LEVELS} levels and "
    f"{MOST_VALUES:,} parts, aliases included.",
)
NOT_FOUND = declare("recipe-not-found", "`--recipe` names neither a bundled recipe nor a file.")
VARIABLE = declare(
    "recipe-variable", "A `${VAR}` of the recipe is not set and has no `:-default`, or is not well-formed."
)

declare = problem_kinds(THEME)
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


class TooLarge(ValueError):
    """A value has more levels or parts than any option needs."""


def read_document(path: Path) -> CommentedMap:
    """The mapping in a YAML file, with the line of each key; an empty one where the file is empty.
    Raises ConfigError: it is not such a file, or it is too large."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(_too_large(f"recipe {path} has more than {MOST_BYTES >> 10} KiB", str(path)))
        document = YAML().load(content.decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(SYNTAX(f"recipe cannot be read: {error}", where=str(path), fix="give a YAML file")) from None
    except UnicodeDecodeError as error:
        raise ConfigError(SYNTAX(f"recipe is not UTF-8: {error}", where=str(path), fix="save it as UTF-8")) from None
    except MarkedYAMLError as error:
        raise ConfigError(_not_yaml(path, error)) from None
    except RecursionError:
        raise ConfigError(_too_large(f"recipe {path} is nested too deeply", str(path))) from None
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 ruamel raises anything for odd merge keys, tags and numbers
        message = f"recipe has something that YAML cannot read: {type(error).__name__}: {str(error)[:200]}"
        raise ConfigError(SYNTAX(message, where=str(path), fix="correct or remove it")) from None
    if document is None:
        return CommentedMap()
    if not isinstance(document, CommentedMap):
        message = f"recipe {path} is not a mapping of sections"
        raise ConfigError(SYNTAX(message, where=f"{path}:1", fix="write `section:` and indented keys"))
    return document


def line_of(mapping: CommentedMap, key: Any, path: Path) -> str:
    """`FILE:LINE` of a key; the file alone for one that a merge key brought in."""
    try:
        return f"{path}:{mapping.lc.key(key)[0] + 1}"
    except (KeyError, TypeError, AttributeError):
        return str(path)


def yaml_value(text: str) -> Any:
    """A value as YAML 1.2 reads it; what is not YAML, or too large, stays text."""
    if len(text) > MOST_BYTES:
        return text
    try:
        return plain(YAML(typ="safe", pure=True).load(io.StringIO(text)))
    except Exception:  # noqa: BLE001 as above; a text that is not YAML is what was typed
        return text


def plain(value: Any) -> Any:
    """ruamel's types as ordinary Python values.
    Raises TooLarge: it has too many levels or parts, which aliases can make out of little."""
    return _plain(value, MOST_LEVELS, [MOST_VALUES])


def _plain(value: Any, levels: int, left: list[int]) -> Any:
    left[0] -= 1
    if levels < 0 or left[0] < 0:
        raise TooLarge("too many levels or parts")
    if isinstance(value, dict):
        return {_plain(k, levels - 1, left): _plain(v, levels - 1, left) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        parts = [_plain(v, levels - 1, left) for v in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise TooLarge(f"an integer of {value.bit_length()} bits")
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _not_yaml(path: Path, error: MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
    reason = str(error.problem or error.context).partition(" with value")[0]
    if isinstance(error, DuplicateKeyError):
        message = f"recipe has a {reason.removeprefix('found ')}"
        return DUPLICATE_KEY(message, where=where, fix="keep one of the two")
    return SYNTAX(f"recipe is not valid YAML: {reason}", where=where, fix="correct this line")


def _too_large(message: str, where: str) -> Problem:
    return TOO_LARGE(message, where=where, fix="write the options that differ from the defaults, and nothing else")


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
    path = Path(os.path.expanduser(name))
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
            setting = _literal(section, key, raw, line_of(body, key, path))
            if key not in defaults[section]:
                problems.append(unknown_key(section, key, setting.where, model))
            elif HIDDEN in json.dumps(setting.value, default=str):
                message = f"{section}.{key} had a secret, which config.json does not keep"
                fix = f"give {flag(key)} after --recipe"
                secret = SECRET_LEFT_OUT(message, fix=fix, option=flag(key), where=setting.where)
                settings.append(replace(setting, problems=(secret,)))
            # A run with a number of rollouts has it from its passes over the data, if those were given.
            elif key not in ("run_dir", "num_epoch") and (setting.problems or setting.value != defaults[section][key]):
                settings.append(setting)
    return settings, problems


def _setting(section: str, key: str, raw: Any, where: str, variables: Mapping[str, str]) -> Setting:
    literal = _literal(section, key, raw, where)
    problems = list(literal.problems)
    expanded = _expand(literal.value, where, variables, problems)
    is_text = isinstance(expanded, str) and expanded != literal.value
    return replace(literal, value=expanded, is_text=is_text, problems=tuple(problems))


def _literal(section: str, key: str, raw: Any, where: str) -> Setting:
    """A value in which nothing is expanded."""
    try:
        return Setting(section, key, plain(raw), where, is_text=False)
    except TooLarge as error:
        large = TOO_LARGE(f"{section}.{key} has {error}", where=where, fix="write it shorter, and without aliases")
        return Setting(section, key, None, where, is_text=False, problems=(large,))


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
