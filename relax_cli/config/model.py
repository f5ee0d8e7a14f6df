"""The configuration model: core sections plus one per estimator plugin, and look-ups by field name."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, Union, get_args, get_origin

from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo

from relax_cli.config.schema import Config, Section
from relax_cli.errors import ConfigError, Problem


class EstimatorOptions(Protocol):
    """What the configuration needs of an estimator plugin (`relax_cli.plugin.records.Estimator` fits)."""

    @property
    def name(self) -> str: ...
    @property
    def summary(self) -> str: ...
    @property
    def options(self) -> type[Section]: ...
    @property
    def needs_critic(self) -> bool: ...


def config_model(estimators: Iterable[EstimatorOptions]) -> type[Config]:
    """The core `Config` with a section per estimator for those of its options that the core does not have.

    Raises:
        ConfigError: a section or option name is claimed twice; names both claimants.
    """
    owners = {name: f"the core section {section}" for name, (section, _) in options_by_name(Config).items()}
    core_names = set(owners)
    sections: dict[str, Any] = {}
    for estimator in estimators:
        own = {n: f for n, f in estimator.options.model_fields.items() if n not in core_names}
        if not own:
            continue
        claims = [(n, owners[n]) for n in own if n in owners]
        if estimator.name in Config.model_fields:
            claims.append((estimator.name, "a core section"))
        if claims:
            raise ConfigError([_claimed_twice(name, owner, estimator.name) for name, owner in claims])
        owners.update(dict.fromkeys(own, f"estimator {estimator.name}"))
        fields: dict[str, Any] = {n: (f.annotation, f) for n, f in own.items()}
        section = create_model(f"{estimator.name.title()}Section", __base__=Section, **fields)
        section.__doc__ = estimator.summary
        sections[estimator.name] = (section, section())
    return create_model("Config", __base__=Config, **sections)


def options_by_name(model: type[Config]) -> dict[str, tuple[str, FieldInfo]]:
    """Every option of the model: field name, unique over all sections, to (section name, field)."""
    return {
        name: (section, field)
        for section in model.model_fields
        for name, field in section_model(model, section).model_fields.items()
    }


def section_model(model: type[Config], section: str) -> type[Section]:
    """The pydantic model of one section."""
    annotation = model.model_fields[section].annotation
    assert isinstance(annotation, type)
    assert issubclass(annotation, Section)
    return annotation


def option_value(config: Config, name: str) -> Any:
    """The value of an option by its field name, whichever section holds it."""
    section, _ = options_by_name(type(config))[name]
    return getattr(getattr(config, section), name)


def estimator_options(config: Config, estimator: EstimatorOptions) -> Section:
    """The estimator's option model, filled by field name from the core sections and the estimator's own one.

    Raises:
        ConfigError: the option model's own validators refuse the values.
    """
    known = options_by_name(type(config))
    missing = [n for n in estimator.options.model_fields if n not in known]
    assert not missing, f"options {missing} of {estimator.name} are not in the configuration model"
    try:
        return estimator.options(**{n: option_value(config, n) for n in estimator.options.model_fields})
    except ValidationError as error:
        raise ConfigError([_option_problem(estimator.name, dict(e)) for e in error.errors()]) from error


def rebuild_config(dump: Mapping[str, Any]) -> Config:
    """The configuration again from `config.model_dump(mode="json")`, given the same plugins.

    Raises:
        ConfigError: this process lacks the plugin of a section, or a value no longer validates.
    """
    # Plugins build their option models from the schema, so plugin imports config; only this call goes back.
    from relax_cli.plugin.manager import load_plugins

    try:
        return config_model(load_plugins().estimators().values()).model_validate(dump)
    except ValidationError as error:
        raise ConfigError([_rebuild_problem(dict(e)) for e in error.errors()]) from error


def flag(name: str) -> str:
    """`rollout_batch_size` as `--rollout-batch-size`."""
    return "--" + name.replace("_", "-")


def base_type(field: FieldInfo) -> Any:
    """The type of a field without `None`: bool, int, float, str, tuple, dict or `Literal`."""
    annotation: Any = field.annotation
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (a for a in get_args(annotation) if a is not type(None))
    return get_origin(annotation) or annotation


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The allowed values of a `Literal` field, empty for any other."""
    annotation: Any = field.annotation
    options = [annotation, *get_args(annotation)]
    return tuple(str(a) for o in options if get_origin(o) is Literal for a in get_args(o))


def is_optional(field: FieldInfo) -> bool:
    """Whether the field may be `None`."""
    return type(None) in get_args(field.annotation)


def _claimed_twice(name: str, owner: str, estimator: str) -> Problem:
    return Problem(
        id="option-claimed-twice",
        message=f"option {name} is claimed by {owner} and by estimator {estimator}",
        fix="uninstall one of the two plugins, or rename the option in its option model",
        option=flag(name),
    )


def _option_problem(estimator: str, error: dict[str, Any]) -> Problem:
    names = [str(part) for part in error["loc"]]
    return Problem(
        id="estimator-option",
        message=f"estimator {estimator} refuses its options: {error['msg']}",
        fix=f"change {flag(names[0])}" if names else f"see the options of {estimator} in `relax train --help`",
        option=flag(names[0]) if names else "",
    )


def _rebuild_problem(error: dict[str, Any]) -> Problem:
    path = ".".join(str(part) for part in error["loc"])
    return Problem(
        id="config-not-rebuilt",
        message=f"this process cannot rebuild the configuration at {path}: {error['msg']}",
        fix="install the same relax-cli and plugins here; `relax plugins list` shows what is found",
    )
