"""Layers: default < recipes < `RELAX_*` environment < `--set` < named flag, with origins."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from relax_cli.config.model import flag, options_by_name, section_model
from relax_cli.config.names import meant_option, nearest
from relax_cli.config.recipes import THEME, UNKNOWN_SECTION, Setting, find_recipe, read_recipe, unknown_key
from relax_cli.config.replaced import ended_options
from relax_cli.config.schema import Config, Section
from relax_cli.config.values import ADDED_UP, NULL, PATH_OPTIONS, UNSET, invalid, prepare, with_expanded_paths
from relax_cli.errors import ConfigError, Problem, problem_kind

UNKNOWN_ENVIRONMENT = problem_kind(
    "unknown-environment",
    THEME,
    "A `RELAX_*` variable is not an option. A typing error there would otherwise change nothing, silently.",
)
SET_SYNTAX = problem_kind("set-syntax", THEME, "`--set` takes `SECTION.KEY=VALUE`.", option="--set")
SET = "--set"
NOT_OPTIONS = frozenset({"RELAX_DEBUG", "RELAX_CACHE", "RELAX_WARM"})
"""`RELAX_*` names that steer the program itself."""

T = TypeVar("T")


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
    unread: frozenset[str] = frozenset()
    """Names of the options whose value is not known, because it has a problem."""
    layers: Mapping[str, int] = field(default_factory=dict)
    """Name of each option that was given to the number of its layer, see `Setting.layer`."""

    def without(self, names: Collection[str]) -> Loaded:
        """The same as if these options had not been given."""
        config, origins = self.config, dict(self.origins)
        for name in names:
            section, option = options_by_name(type(config))[name]
            default = option.get_default(call_default_factory=True)
            body = getattr(config, section).model_copy(update={name: default})
            config = config.model_copy(update={section: body})
            origins[f"{section}.{name}"] = "default"
        return replace(self, config=config, origins=origins)


class UnreadOption(ConfigError):
    """An option was looked at whose value could not be read, which was reported with the value."""


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
    settings = [with_expanded_paths(s, layers.env) for s in _settings(layers, model, fields, problems)]
    last = {setting.key: setting for setting in settings}
    prepared = [(setting, prepare(setting, fields[setting.key][1])) for setting in settings]
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
            if setting.key in PATH_OPTIONS and isinstance(value, str):
                # What is known of a path with a variable that is not set; `with_paths` shows it.
                section[setting.key] = value
        elif value is UNSET:
            section.pop(setting.key, None)
            origins[f"{setting.section}.{setting.key}"] = "default"
        elif setting.key in ADDED_UP:
            section[setting.key] = section.get(setting.key, {}) | value
        else:
            section[setting.key] = value
    config = _validated(model, values, origins, problems, unread)
    numbers = {name: setting.layer for name, setting in last.items() if name not in ended}
    return Loaded(_hiding(config, unread, unread), origins, tuple(problems), frozenset(unread), numbers)


def _settings(
    layers: Layers, model: type[Config], fields: Mapping[str, tuple[str, FieldInfo]], problems: list[Problem]
) -> list[Setting]:
    read: list[list[Setting]] = []
    for name in layers.recipes:
        try:
            settings, bad = read_recipe(find_recipe(name), layers.env, model)
        except ConfigError as error:
            problems += error.problems
            continue
        read.append(settings)
        problems += bad
    read += [_env_settings(layers.env, fields, problems), _override_settings(layers.overrides, model, problems)]
    flags = {name: value for name, value in layers.flags.items() if value is not None and value != [] and value != ()}
    read.append([Setting(fields[k][0], k, value, flag(k), is_text=value == NULL) for k, value in flags.items()])
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
            section, name = str(item["loc"][0]), str(item["loc"][1])
            problems.append(invalid(dict(item), origins))
            values[section].pop(name, None)
            unread.add(name)
    return _validated(model, values, origins, problems, unread)


def with_paths(config: Config, unread: Collection[str]) -> Config:
    """The configuration, in which paths read as they were written although a variable in them is not set."""
    return _hiding(config, unread, set(unread) - PATH_OPTIONS)


def _hiding(config: Config, unread: Collection[str], hidden: Collection[str]) -> Config:
    """The configuration, in which to look at one of the options `hidden` of those `unread` raises `UnreadOption`."""
    owners = {section for name, (section, _) in options_by_name(type(config)).items() if name in unread}
    sections = {name: _partial(section_model(type(config), name), getattr(config, name), hidden) for name in owners}
    return config.model_copy(update=sections)


def _partial(model: type[Section], section: Section, hidden: Collection[str]) -> Section:
    class Partial(model):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            if name in hidden:
                raise UnreadOption(())
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
        guess = f"RELAX_{option.upper()}" if option else nearest(variable, NOT_OPTIONS, cutoff=0.85)
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
        is_pair = bool(equals and dot)
        if is_pair and key in fields and fields[key][0] == section:
            settings.append(Setting(section, key, text, SET, is_text=True))
            continue
        name = meant_option(key if is_pair else path, fields)
        typed = f"--set {shlex.quote(f'{fields[name][0]}.{name}={text}')}" if name and equals else ""
        if not is_pair:
            message, fix = f"--set {override!r} is not section.key=value", typed or "--set SECTION.KEY=VALUE"
            problems.append(SET_SYNTAX(message, fix=fix, where=SET, got=override))
        elif section not in model.model_fields:
            message, guess = f"there is no section {section!r}", nearest(section, model.model_fields)
            fix = typed or f"sections: {', '.join(model.model_fields)}"
            problems.append(UNKNOWN_SECTION(message, fix=fix, option=SET, where=SET, got=section, expected=guess))
        else:
            unknown = unknown_key(section, key, SET, model)
            problems.append(replace(unknown, option=SET, fix=typed or unknown.fix))
    return settings
