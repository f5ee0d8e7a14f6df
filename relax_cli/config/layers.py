"""Layers: default < recipes < `RELAX_*` environment < `--set` < named flag, with origins."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from relax_cli.config.model import base_type, flag, is_optional, options_by_name
from relax_cli.config.names import meant_option, nearest
from relax_cli.config.paths import PATH_OPTIONS, expand_path
from relax_cli.config.recipes import THEME, UNKNOWN_SECTION, Setting, find_recipe, read_recipe, unknown_key
from relax_cli.config.redact import redacted
from relax_cli.config.replaced import ended_options
from relax_cli.config.schema import Config, Section
from relax_cli.errors import ConfigError, Problem, problem_kind

UNKNOWN_ENVIRONMENT = problem_kind(
    "unknown-environment",
    THEME,
    "A `RELAX_*` variable is not an option. A typing error there would otherwise change nothing, silently.",
)
SET_SYNTAX = problem_kind("set-syntax", THEME, "`--set` takes `SECTION.KEY=VALUE`.", option="--set")
INVALID_VALUE = problem_kind(
    "invalid-value",
    THEME,
    "The value has the wrong type, is out of range or is not finite. A switch takes `true` and `false`: `on`, `yes` "
    "and 1 are text and numbers in YAML 1.2. A number may stand in quotes, text may not be left without them where "
    "YAML reads a number.",
)
PATH_VARIABLE = problem_kind(
    "path-variable",
    THEME,
    "A path has a `$VAR` that is not set. `~` and variables are expanded in the paths of every layer.",
)
RESOURCE_JSON = problem_kind(
    "resource-json",
    THEME,
    '`--resource` is not a JSON object `{"role": [services, devices]}` of whole numbers.',
    option="--resource",
)
SERVER_OPTIONS_JSON = problem_kind(
    "sglang-options-json",
    "SGLang servers",
    "`--sglang-options` is not a JSON object of server options.",
    option="--sglang-options",
)

SET = "--set"
NULL = "null"
"""What unsets an option in any layer: it is as if no layer before had given it."""
UNSET = object()
NOT_OPTIONS = frozenset({"RELAX_DEBUG", "RELAX_CACHE"})
"""`RELAX_*` names that steer the program itself."""

ADDED_UP = frozenset({"sglang_options"})
"""Options whose layers are put together key by key; of all others the last layer wins."""

T = TypeVar("T")

_RESOURCE_EXAMPLE = """--resource '{"actor": [1, 1], "critic": [1, 1], "rollout": [1, 1], "advantages": [1, 0]}'"""


@dataclass(frozen=True)
class Layers:
    """What a user gave, the lowest layer first."""

    recipes: Sequence[str] = ()
    """Bundled names or file paths; later ones win."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Only `RELAX_*` names and the variables that recipes mention are looked at."""
    overrides: Sequence[str] = ()
    """`section.key=value` with YAML values."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Field name to the text or value given; None and empty sequences mean not given."""


@dataclass(frozen=True)
class Loaded:
    """A configuration and where each of its values came from."""

    config: Config
    """Options of `unread` raise `UnreadOption` when looked at."""
    origins: dict[str, str]
    """`section.key` to `default`, `FILE:LINE`, `RELAX_X`, `--set` or the flag."""
    problems: tuple[Problem, ...] = ()
    """Every problem of every layer."""
    unread: frozenset[str] = frozenset()
    """Names of the options whose value is not known, because it has a problem."""


class UnreadOption(ConfigError):
    """An option was looked at whose value could not be read. Holds no problem: that was reported with the value."""

    def __init__(self, problems: Sequence[Problem] = ()) -> None:
        super().__init__(problems)


def known(value: Callable[[], T]) -> T | None:
    """The value, or None where it takes an option that could not be read."""
    try:
        return value()
    except UnreadOption:
        return None


def load_config(layers: Layers, model: type[Config]) -> Loaded:
    """Merge the layers and validate the result. What is wrong with one option hides no problem of another."""
    problems: list[Problem] = []
    fields = options_by_name(model)
    settings = [_with_expanded_paths(s, layers.env) for s in _settings(layers, model, fields, problems)]
    last = {setting.key: setting for setting in settings}
    prepared = [(setting, _prepare(setting, fields[setting.key][1])) for setting in settings]
    given = {s.key: (s.layer, value) for s, value in prepared if not isinstance(value, Problem) and not s.problems}
    ended = ended_options({name: pair for name, pair in given.items() if last[name].layer == pair[0]})
    origins = {f"{section}.{name}": "default" for name, (section, _) in fields.items()}
    values: dict[str, dict[str, Any]] = {}
    unread: set[str] = set()
    for setting, value in prepared:
        if setting.key in ended or (setting is not last[setting.key] and setting.key not in ADDED_UP):
            continue
        origins[f"{setting.section}.{setting.key}"] = setting.where
        section = values.setdefault(setting.section, {})
        if setting.problems or isinstance(value, Problem):
            problems += setting.problems or [value]
            unread.add(setting.key)
        elif value is UNSET:
            section.pop(setting.key, None)
            origins[f"{setting.section}.{setting.key}"] = "default"
        elif setting.key in ADDED_UP:
            section[setting.key] = section.get(setting.key, {}) | value
        else:
            section[setting.key] = value
    config = _validated(model, values, origins, problems, unread)
    return Loaded(_without(config, unread), origins, tuple(problems), frozenset(unread))


def _settings(
    layers: Layers, model: type[Config], fields: Mapping[str, tuple[str, FieldInfo]], problems: list[Problem]
) -> list[Setting]:
    """The values of all layers, the lowest first."""
    read: list[list[Setting]] = []
    for name in layers.recipes:
        try:
            settings, bad = read_recipe(find_recipe(name), layers.env, model)
        except ConfigError as error:
            problems += error.problems
            continue
        read.append(settings)
        problems += bad
    read.append(_env_settings(layers.env, fields, problems))
    read.append(_override_settings(layers.overrides, model, problems))
    read.append(
        [
            Setting(fields[name][0], name, value, flag(name), is_text=value == NULL)
            for name, value in layers.flags.items()
            if value is not None and value != [] and value != ()
        ]
    )
    return [replace(setting, layer=layer) for layer, settings in enumerate(read) for setting in settings]


def _validated(
    model: type[Config],
    values: dict[str, dict[str, Any]],
    origins: Mapping[str, str],
    problems: list[Problem],
    unread: set[str],
) -> Config:
    """The configuration of all values that are valid; the others become problems and are `unread`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        for item in error.errors():
            section, name = (str(part) for part in item["loc"][:2])
            problems.append(_invalid(dict(item), origins))
            values[section].pop(name, None)
            unread.add(name)
    return model.model_validate(values)


def _without(config: Config, unread: Collection[str]) -> Config:
    """The configuration, in which to look at one of these options raises `UnreadOption`."""
    owners = {section for name, (section, _) in options_by_name(type(config)).items() if name in unread}
    return config.model_copy(update={section: _partial(getattr(config, section), unread) for section in owners})


def _partial(section: Section, unread: Collection[str]) -> Section:
    hidden = frozenset(unread)

    class Partial(type(section)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in hidden:
                raise UnreadOption
            return super().__getattribute__(name)

    partial: Section = Partial.model_construct(**dict(section))
    return partial


def _env_settings(
    env: Mapping[str, str], fields: Mapping[str, tuple[str, FieldInfo]], problems: list[Problem]
) -> list[Setting]:
    by_variable = {f"RELAX_{name.upper()}": name for name in fields}
    settings = []
    for variable, text in env.items():
        if not variable.startswith("RELAX_") or variable in NOT_OPTIONS:
            continue
        if variable in by_variable:
            name = by_variable[variable]
            settings.append(Setting(fields[name][0], name, text, variable, is_text=True))
            continue
        option = meant_option(variable.removeprefix("RELAX_"), fields)
        guess = f"RELAX_{option.upper()}" if option else nearest(variable, NOT_OPTIONS)
        message = f"environment variable {variable} is not an option of relax"
        fix = f"use {guess}, or `unset {variable}`" if guess else f"unset {variable}"
        problems.append(UNKNOWN_ENVIRONMENT(message, fix=fix, where=variable, got=variable, expected=guess))
    return settings


def _override_settings(overrides: Sequence[str], model: type[Config], problems: list[Problem]) -> list[Setting]:
    settings = []
    fields = options_by_name(model)
    for override in overrides:
        path, equals, text = override.partition("=")
        section, dot, key = path.strip().partition(".")
        if not equals or not dot:
            name = meant_option(path, fields)
            fix = f"--set {fields[name][0]}.{name}={text}" if name and equals else "--set SECTION.KEY=VALUE"
            message = f"--set {override!r} is not section.key=value"
            problems.append(SET_SYNTAX(message, fix=fix, where="--set", got=override))
        elif section not in model.model_fields:
            guess = nearest(section, model.model_fields)
            sections = f"sections: {', '.join(model.model_fields)}"
            name = meant_option(key, fields)
            fix = f"--set {fields[name][0]}.{name}={text}" if name else sections
            message = f"there is no section {section!r}"
            problems.append(
                UNKNOWN_SECTION(message, fix=fix, option="--set", where="--set", got=section, expected=guess)
            )
        elif key not in fields or fields[key][0] != section:
            unknown = unknown_key(section, key, SET, model)
            fix = f"--set {unknown.fix.removeprefix('use ')}={text}" if unknown.expected else unknown.fix
            problems.append(replace(unknown, option=SET, fix=fix))
        else:
            settings.append(Setting(section, key, text, SET, is_text=True))
    return settings


def _with_expanded_paths(setting: Setting, env: Mapping[str, str]) -> Setting:
    if setting.key not in PATH_OPTIONS:
        return setting
    missing: list[str] = []

    def expand(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [expand(item) for item in value]
        # A lone ~ is YAML's null.
        if not isinstance(value, str) or (setting.is_text and value == "~"):
            return value
        text, names = expand_path(value, env, braces=setting.where.startswith(("RELAX_", "--")))
        missing.extend(names)
        return text

    value, option = expand(setting.value), flag(setting.key)
    problems = tuple(
        PATH_VARIABLE(
            f"{option} has ${name}, a variable that is not set",
            fix=f"export {name}=…, or write the path out",
            option=option,
            where=setting.where,
            got=str(redacted(setting.section, setting.key, setting.value)),
        )
        for name in dict.fromkeys(missing)
    )
    return replace(setting, value=value, problems=(*setting.problems, *problems))


def _prepare(setting: Setting, field: FieldInfo) -> Any:
    """The value as pydantic may see it, or the problem that pydantic's leniency would hide."""
    kind = base_type(field)
    value = _from_text(setting.value, field) if setting.is_text else setting.value
    is_typed = setting.where.startswith(("RELAX_", "--"))
    if value is None and not is_optional(field) and (is_typed or kind in (tuple, dict)):
        return UNSET
    if kind is str and value == "" and field.default != "":
        return _bad_value(setting, "a text that is not empty", f"leave {flag(setting.key)} out, or give it a value")
    if kind is dict:
        return _mapping(setting, value)
    if kind is tuple and isinstance(value, str):
        value = (value,)
    if kind is bool and not isinstance(value, bool):
        return _bad_value(setting, "true or false", f"write {setting.section}.{setting.key}: true (or false)")
    if kind in (int, float) and isinstance(value, bool):
        return _bad_value(setting, "a number", "write a number instead of true or false")
    return value


def _from_text(text: str, field: FieldInfo) -> Any:
    """Text read as YAML 1.2, except that a text option keeps what was typed (`123`, `a: b`)."""
    try:
        value = YAML(typ="safe", pure=True).load(io.StringIO(text))
    except YAMLError:
        return text
    keeps: dict[Any, tuple[type, ...]] = {str: (str,), tuple: (str, list)}
    wanted = keeps.get(base_type(field))
    if wanted is None or isinstance(value, wanted) or text == NULL or (value is None and is_optional(field)):
        return value
    return text


def _mapping(setting: Setting, value: Any) -> Any:
    """A JSON object from a flag, or a mapping from any other layer; `true` and `"1"` are not counts."""
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=_unique_keys)
        except ValueError as error:
            return _bad_json(setting, f"{flag(setting.key)} is not JSON: {error}")
    if not isinstance(value, dict):
        return _bad_json(setting, f"{flag(setting.key)} is not a JSON object")
    if setting.key in ADDED_UP:
        return {str(key).replace("-", "_"): item for key, item in value.items()}
    if any(type(count) is not int for pair in value.values() if isinstance(pair, list) for count in pair):
        return _bad_json(setting, f"{flag(setting.key)} has a count that is not a whole number")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} given twice")
    return dict(pairs)


def _bad_json(setting: Setting, message: str) -> Problem:
    got = str(setting.value)
    if setting.key == "resource":
        expected = 'a JSON object {"role": [services, devices]}'
        return RESOURCE_JSON(message, fix=_RESOURCE_EXAMPLE, where=setting.where, got=got, expected=expected)
    fix = """--sglang-options '{"attention_backend": "triton"}'"""
    expected = "a JSON object of server options"
    return SERVER_OPTIONS_JSON(message, fix=fix, where=setting.where, got=got, expected=expected)


def _bad_value(setting: Setting, expected: str, fix: str) -> Problem:
    return INVALID_VALUE(
        f"{flag(setting.key)} has the wrong type",
        fix=fix,
        option=flag(setting.key),
        where=setting.where,
        got=str(redacted(setting.section, setting.key, setting.value)),
        expected=expected,
    )


def _invalid(error: dict[str, Any], origins: Mapping[str, str]) -> Problem:
    """A pydantic error in four parts."""
    section, key, *inside = (str(part) for part in error["loc"])
    expected = error["msg"].removeprefix("Input should be ").partition(", unable")[0]
    of = f" ({' '.join(inside)})" if inside else ""
    is_resource = key == "resource"
    kind = RESOURCE_JSON if is_resource else INVALID_VALUE
    return kind(
        f"{flag(key)}{of} does not accept this value",
        fix=_RESOURCE_EXAMPLE if is_resource else f"give {section}.{key} a value that is {expected}",
        option=flag(key),
        where=origins[f"{section}.{key}"],
        got=str(redacted(section, key, error["input"])),
        expected=expected,
    )
