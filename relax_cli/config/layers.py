"""Layers: default < recipes < `RELAX_*` environment < `--set` < named flag, with origins."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from relax_cli.config.model import (
    base_type,
    config_model,
    estimator_options,
    flag,
    is_optional,
    option_value,
    options_by_name,
    rebuild_config,
)
from relax_cli.config.recipes import Setting, find_recipe, nearest, read_recipe, unknown_key
from relax_cli.config.redact import redacted
from relax_cli.config.schema import Config
from relax_cli.errors import ConfigError, Problem

__all__ = [
    "Loaded",
    "config_model",
    "estimator_options",
    "load_config",
    "option_value",
    "options_by_name",
    "rebuild_config",
]

NOT_OPTIONS = frozenset({"RELAX_DEBUG", "RELAX_CACHE"})
"""`RELAX_*` names that steer the program itself."""

ADDED_UP = frozenset({"sglang_options"})
"""Options whose layers are put together key by key; of all others the last layer wins."""

_RESOURCE_EXAMPLE = """--resource '{"actor": [1, 1], "critic": [1, 1], "rollout": [1, 1], "advantages": [1, 0]}'"""


@dataclass(frozen=True)
class Loaded:
    """A configuration and where each of its values came from."""

    config: Config
    origins: dict[str, str]
    """`section.key` to `default`, `FILE:LINE`, `RELAX_X`, `--set` or the flag."""


def load_config(
    recipes: Sequence[str],
    env: Mapping[str, str],
    overrides: Sequence[str],
    flags: Mapping[str, Any],
    *,
    config_model: type[Config],
) -> Loaded:
    """Merge the layers and validate the result.

    Args:
        recipes: bundled names or file paths, later ones win.
        env: the environment; only `RELAX_*` names and the variables recipes mention are looked at.
        overrides: `section.key=value` with YAML values.
        flags: field name to the text or value given; None and empty sequences mean not given.

    Raises:
        ConfigError: holds every problem of every layer.
    """
    problems: list[Problem] = []
    settings: list[Setting] = []
    for name in recipes:
        try:
            found, bad = read_recipe(find_recipe(name), env, config_model)
        except ConfigError as error:
            problems += error.problems
            continue
        settings += found
        problems += bad
    fields = options_by_name(config_model)
    settings += _env_settings(env, fields, problems)
    settings += _override_settings(overrides, config_model, problems)
    settings += [
        Setting(fields[name][0], name, value, flag(name), is_text=False)
        for name, value in flags.items()
        if value is not None and value != [] and value != ()
    ]

    merged = {(s.section, s.key): s for s in settings if s.key not in ADDED_UP}
    origins = {f"{section}.{name}": "default" for name, (section, _) in fields.items()}
    origins.update({f"{s.section}.{s.key}": s.where for s in settings})
    values: dict[str, dict[str, Any]] = {}
    for setting in (*merged.values(), *(s for s in settings if s.key in ADDED_UP)):
        value = _prepare(setting, fields[setting.key][1])
        section = values.setdefault(setting.section, {})
        if isinstance(value, Problem):
            problems.append(value)
        elif setting.key in ADDED_UP:
            section[setting.key] = section.get(setting.key, {}) | value
        else:
            section[setting.key] = value
    try:
        config = config_model.model_validate(values)
    except ValidationError as error:
        problems += [_invalid(dict(e), origins) for e in error.errors()]
    if problems:
        raise ConfigError(problems)
    return Loaded(config, origins)


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
        guess = nearest(variable, [*by_variable, *NOT_OPTIONS])
        problems.append(
            Problem(
                id="unknown-environment",
                message=f"environment variable {variable} is not an option of relax",
                fix=f"use {guess}, or `unset {variable}`" if guess else f"unset {variable}",
                where=variable,
                got=variable,
                expected=guess,
            )
        )
    return settings


def _override_settings(overrides: Sequence[str], model: type[Config], problems: list[Problem]) -> list[Setting]:
    settings = []
    fields = options_by_name(model)
    for override in overrides:
        path, equals, text = override.partition("=")
        section, dot, key = path.strip().partition(".")
        if not equals or not dot:
            owner = fields.get(path.strip())
            fix = f"--set {owner[0]}.{path.strip()}={text}" if owner else "--set optimizer.lr=1e-5"
            message = f"--set {override!r} is not section.key=value"
            problems.append(
                Problem(id="set-syntax", message=message, fix=fix, option="--set", where="--set", got=override)
            )
        elif section not in model.model_fields:
            guess = nearest(section, model.model_fields)
            message = f"there is no section {section!r}"
            fix = (
                f"--set {fields[key][0]}.{key}={text}"
                if key in fields
                else f"sections: {', '.join(model.model_fields)}"
            )
            problems.append(
                Problem(
                    id="unknown-section",
                    message=message,
                    fix=fix,
                    option="--set",
                    where="--set",
                    got=section,
                    expected=guess,
                )
            )
        elif key not in fields or fields[key][0] != section:
            problems.append(replace(unknown_key(section, key, "--set", model), option="--set"))
        else:
            settings.append(Setting(section, key, text, "--set", is_text=True))
    return settings


def _prepare(setting: Setting, field: FieldInfo) -> Any:
    """The value as pydantic may see it, or the problem that pydantic's leniency would hide."""
    kind = base_type(field)
    value = _from_text(setting.value, field) if setting.is_text else setting.value
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
    if wanted is None or isinstance(value, wanted) or (value is None and is_optional(field)):
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
        return _bad_json(setting, f"{flag(setting.key)} holds a count that is not a whole number")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} given twice")
    return dict(pairs)


def _bad_json(setting: Setting, message: str) -> Problem:
    is_resource = setting.key == "resource"
    return Problem(
        id="resource-json" if is_resource else "sglang-options-json",
        message=message,
        fix=_RESOURCE_EXAMPLE if is_resource else '--sglang-options \'{"attention_backend": "triton"}\'',
        option=flag(setting.key),
        where=setting.where,
        got=str(setting.value),
        expected='a JSON object {"role": [services, devices]}' if is_resource else "a JSON object of server options",
    )


def _bad_value(setting: Setting, expected: str, fix: str) -> Problem:
    return Problem(
        id="invalid-value",
        message=f"{flag(setting.key)} has the wrong type",
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
    return Problem(
        id="resource-json" if is_resource else "invalid-value",
        message=f"{flag(key)}{of} does not accept this value",
        fix=_RESOURCE_EXAMPLE if is_resource else f"give {section}.{key} a value that is {expected}",
        option=flag(key),
        where=origins[f"{section}.{key}"],
        got=str(redacted(section, key, error["input"])),
        expected=expected,
    )
