"""The configuration model: the core sections and one for each estimator plugin that has options of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError, create_model
from pydantic_core import ErrorDetails

from relax_cli.config.model import flag, option_value, options_by_name
from relax_cli.config.schema import Config, Section
from relax_cli.errors import ConfigError, problem_kinds
from relax_cli.plugin.manager import load_plugins
from relax_cli.plugin.records import Estimator

THEME = "Reading the configuration"
declare = problem_kinds(THEME)
OPTION_REFUSED = declare("estimator-option", "The estimator's own validators refuse the combination of its options.")
CLAIMED_TWICE = declare("option-claimed-twice", "Two plugins, or a plugin and the core, define an option of one name.")
NOT_REBUILT = declare(
    "config-not-rebuilt",
    "A worker process could not rebuild the configuration: its node has other plugins or another version of relax.",
)


def config_model(estimators: Iterable[Estimator]) -> type[Config]:
    """The core `Config` with a section per estimator for those of its options that the core does not have.
    Raises ConfigError: a section or option name is claimed twice; names both claimants."""
    core_names, owners = set(options_by_name(Config)), dict[str, str]()
    sections: dict[str, Any] = {}
    for estimator in estimators:
        own = {n: f for n, f in estimator.options.model_fields.items() if n not in core_names}
        if not own:
            continue
        claims = [(n, owners[n]) for n in own if n in owners]
        if estimator.name in Config.model_fields:
            claims.append((estimator.name, "a core section"))
        if claims:
            fix, claimer = "uninstall one of the two plugins, or rename the option in its option model", estimator.name
            claimed = [(n, f"option {n} is claimed by {owner} and by estimator {claimer}") for n, owner in claims]
            raise ConfigError([CLAIMED_TWICE(what, fix=fix, option=flag(name)) for name, what in claimed])
        owners.update(dict.fromkeys(own, f"estimator {estimator.name}"))
        fields: dict[str, Any] = {n: (f.annotation, f) for n, f in own.items()}
        section = create_model(f"{estimator.name.title()}Section", __base__=Section, **fields)
        section.__doc__ = estimator.summary
        sections[estimator.name] = (section, section())
    return create_model("Config", __base__=Config, **sections)


def estimator_options(config: Config, estimator: Estimator) -> Section:
    """The estimator's option model, filled by field name from the core sections and the estimator's own one.
    Raises ConfigError: the option model's own validators refuse the values."""
    known = options_by_name(type(config))
    missing = [n for n in estimator.options.model_fields if n not in known]
    assert not missing, f"options {missing} of {estimator.name} are not in the configuration model"
    values = {name: option_value(config, name) for name in estimator.options.model_fields}
    try:
        return estimator.options(**values)
    except ValidationError as error:
        problems = []
        for item in error.errors():
            option = flag(str(item["loc"][0])) if item["loc"] else ""
            message = f"estimator {estimator.name} refuses its options: {_reason(item)}"
            fix = f"change {option}" if option else f"see the options of {estimator.name} in `relax train --help`"
            problems.append(OPTION_REFUSED(message, fix=fix, option=option))
        raise ConfigError(problems) from error


def rebuild_config(dump: Mapping[str, Any]) -> Config:
    """The configuration again from `config.model_dump(mode="json")`, given the same plugins.
    Raises ConfigError: this process lacks the plugin of a section, or a value no longer validates."""
    try:
        return config_model(load_plugins().estimators().values()).model_validate(dump)
    except ValidationError as error:
        fix = "install the same relax-cli and plugins here; `relax plugins list` shows what is found"
        places = [(".".join(map(str, item["loc"])), _reason(item)) for item in error.errors()]
        what = "this process cannot rebuild the configuration"
        raise ConfigError([NOT_REBUILT(f"{what} at {path}: {reason}", fix=fix) for path, reason in places]) from error


def _reason(error: ErrorDetails) -> str:
    return error["msg"].removeprefix("Value error, ")
