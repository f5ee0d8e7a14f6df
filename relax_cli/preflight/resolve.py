"""From what was typed to a checked configuration: the one path of every command that needs one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from relax_cli.config.layers import Loaded, load_config
from relax_cli.config.model import EstimatorOptions, config_model, estimator_options, flag, options_by_name
from relax_cli.config.redact import config_dump, hide, placeholder, redacted, secrets_of
from relax_cli.config.schema import Config
from relax_cli.data.rewards.builtin import BUILTIN_REWARDS
from relax_cli.errors import ConfigError, Problem, is_about_machine
from relax_cli.preflight.device_choice import DeviceChange, installed_torch_has_cuda, settle_device
from relax_cli.preflight.inputs import RunInputs, read_inputs
from relax_cli.preflight.machine import Machine
from relax_cli.preflight.rules import RuleContext, run_rules
from relax_cli.preflight.unused_options import unused_options

PLACES = frozenset({"load", "save", "critic_load", "critic_save", "run_dir"})
"""Options that say where a run lives, not what it computes."""


class Normalised(Protocol):
    """What `relax_cli.plugin.records.Normalized` offers."""

    @property
    def config(self) -> Config: ...
    @property
    def changes(self) -> Sequence[Any]: ...
    @property
    def warnings(self) -> Sequence[Problem]: ...


class PluginsForConfig(Protocol):
    """What is needed of `relax_cli.plugin.manager.Plugins`."""

    def estimators(self) -> Mapping[str, EstimatorOptions]: ...
    def estimator(self, name: str) -> EstimatorOptions: ...
    def rewards(self) -> Collection[str]: ...
    def normalize(self, config: Config) -> Normalised: ...
    def check(self, config: Config) -> Sequence[Problem]: ...


@dataclass(frozen=True)
class ShapeChange:
    """A `relax_cli.plugin.records.Change` made here, below the plugin layer."""

    option: str
    before: str
    after: str
    why: str = "KL terms compare with a reference model, which takes the actor's shape unless --resource gives one"


@dataclass(frozen=True)
class Resolved:
    """A configuration after normalisation, and everything that is known about it."""

    config: Config
    origins: dict[str, str]
    """`section.key` to the layer that gave the value, before normalisation."""
    changes: tuple[Any, ...]
    """What normalisation changed (`relax_cli.plugin.records.Change`)."""
    problems: tuple[Problem, ...]
    """Errors first, then warnings; with `--strict` all are errors."""
    command: tuple[str, ...]
    """Words after `relax train` that give this configuration again, `RELAX_*` values included as `--set`; secrets are
    `relax_cli.config.redact.placeholder`s."""
    inputs: RunInputs = field(default_factory=RunInputs)
    """What model and data files say, where they were read."""
    notes: tuple[Problem, ...] = ()
    """What this machine lacks, where that is not held against the configuration."""

    @property
    def errors(self) -> tuple[Problem, ...]:
        """What stands in the way of a run."""
        return tuple(p for p in self.problems if p.severity == "error")

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """What is allowed, but worth knowing."""
        return tuple(p for p in self.problems if p.severity == "warning")

    @property
    def config_hash(self) -> str:
        """sha256 of what the run computes: every option except those of `PLACES`, and no secret, which may change."""
        values = {
            f"{section}.{name}": value
            for section, body in config_dump(self.config).items()
            for name, value in body.items()
            if name not in PLACES
        }
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def dump(self, config: Config | None = None) -> dict[str, Any]:
        """JSON object of this configuration, or of `config`, its completed form; no secrets."""
        return {
            "config": config_dump(self.config if config is None else config),
            "origins": self.origins,
            "changes": [asdict(change) for change in self.changes],
        }


def resolve(
    plugins: PluginsForConfig,
    recipes: Sequence[str],
    env: Mapping[str, str],
    overrides: Sequence[str],
    flags: Mapping[str, Any],
    *,
    progress: Callable[[str, float], None] | None = None,
    cluster_gpus: Callable[[], int] | None = None,
) -> Resolved:
    """A configuration that may be launched; the arguments are those of `examine`.

    Raises:
        ConfigError: holds every problem, errors first, warnings too.
    """
    resolved = examine(plugins, recipes, env, overrides, flags, progress=progress, cluster_gpus=cluster_gpus)
    if resolved.errors:
        raise ConfigError(resolved.problems)
    return resolved


def examine(
    plugins: PluginsForConfig,
    recipes: Sequence[str],
    env: Mapping[str, str],
    overrides: Sequence[str],
    flags: Mapping[str, Any],
    *,
    skip_files: bool = False,
    here: bool = True,
    progress: Callable[[str, float], None] | None = None,
    cluster_gpus: Callable[[], int] | None = None,
) -> Resolved:
    """A configuration and its problems. The first five arguments are those of `load_config`.

    Args:
        skip_files: leave out what needs the model and data files, or this machine.
        here: what this machine lacks is a problem, not a note.
        progress: told now and then which file is being read, and the part of it that is read.
        cluster_gpus: see `settle_device`.

    Raises:
        ConfigError: no configuration comes out at all: a layer is unreadable, or a value has the wrong type.
    """
    model = config_model(plugins.estimators().values())
    loaded = load_config(recipes, env, overrides, flags, config_model=model)
    machine = Machine()
    settled: tuple[DeviceChange, ...] = ()
    if not skip_files and _has_sane_resources(loaded.config):
        config, settled = settle_device(loaded.config, machine, installed_torch_has_cuda(), cluster_gpus)
        loaded = replace(loaded, config=config)
    config, changes, problems = _apply_estimator(plugins, loaded.config)
    problems += unused_options(loaded.config, loaded.origins, plugins.estimators())
    inputs = RunInputs() if skip_files else read_inputs(config, progress)
    context = RuleContext(config, inputs, machine, frozenset({*BUILTIN_REWARDS, *plugins.rewards()}))
    problems += run_rules(context, skip_files=skip_files)
    notes = [p for p in problems if is_about_machine(p)]
    problems = [p for p in problems if not is_about_machine(p)]
    if here:
        problems, notes = problems + notes, []
    strict = config.run.strict
    secrets = secrets_of(loaded.config)
    judged = (replace(p, severity="error") if strict else p for p in dict.fromkeys(problems))
    ordered = sorted((hide(_located(p, loaded), secrets) for p in judged), key=lambda p: p.severity != "error")
    return Resolved(
        config,
        loaded.origins,
        tuple(_shown(change) for change in (*settled, *changes)),
        tuple(ordered),
        _command(model, recipes, env, overrides, flags),
        inputs,
        tuple(hide(_located(note, loaded), secrets) for note in dict.fromkeys(notes)),
    )


def _has_sane_resources(config: Config) -> bool:
    """Whether counting processes makes sense; rules about `--resource` say why not."""
    return bool(config.parallel.resource) and all(s >= 0 and d >= 0 for s, d in config.parallel.resource.values())


def _apply_estimator(plugins: PluginsForConfig, config: Config) -> tuple[Config, Sequence[Any], list[Problem]]:
    """What the chosen estimator's plugin makes of the configuration, or why there is no such plugin."""
    try:
        estimator_options(config, plugins.estimator(config.algorithm.advantage_estimator))
    except ConfigError as error:
        return config, (), list(error.problems)
    normalised = plugins.normalize(config)
    config, changes = with_reference_shape(normalised.config)
    return config, (*normalised.changes, *changes), [*normalised.warnings, *plugins.check(config)]


def with_reference_shape(config: Config) -> tuple[Config, tuple[ShapeChange, ...]]:
    """The configuration with a place for the reference model of KL terms: that of the actor, unless one is given."""
    resource = config.parallel.resource
    if not config.algorithm.needs_reference or "reference" in resource or "actor" not in resource:
        return config, ()
    completed = {**resource, "reference": resource["actor"]}
    change = ShapeChange("--resource", json.dumps(resource), json.dumps(completed))
    parallel = config.parallel.model_copy(update={"resource": completed})
    return config.model_copy(update={"parallel": parallel}), (change,)


def _command(
    model: type[Config],
    recipes: Sequence[str],
    env: Mapping[str, str],
    overrides: Sequence[str],
    flags: Mapping[str, Any],
) -> tuple[str, ...]:
    words = [word for recipe in recipes for word in ("--recipe", recipe)]
    for name, (section, _) in options_by_name(model).items():
        variable = f"RELAX_{name.upper()}"
        if variable in env:
            words += ["--set", f"{section}.{name}={_typed(section, name, env[variable])}"]
    for override in overrides:
        path, _, text = override.partition("=")
        section, _, name = path.strip().partition(".")
        words += ["--set", f"{path}={_typed(section, name, text)}"]
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        elif value is not None:
            values = value if isinstance(value, list | tuple) else [value]
            section, _ = options_by_name(model)[name]
            words += [word for item in values for word in (flag(name), _typed(section, name, item))]
    return tuple(words)


def _typed(section: str, name: str, value: Any) -> str:
    """A value as it is typed again; one that holds a secret is left to a variable of the shell."""
    text = json.dumps(value) if isinstance(value, Mapping) else str(value)
    return text if redacted(section, name, text) == text else placeholder(name)


def _shown(change: Any) -> Any:
    """A change without secrets."""
    name = change.option.removeprefix("--").replace("-", "_")
    return replace(change, before=redacted("", name, change.before), after=redacted("", name, change.after))


def _located(problem: Problem, loaded: Loaded) -> Problem:
    """The problem with the origin of the option it blames."""
    fields = {flag(name): f"{section}.{name}" for name, (section, _) in options_by_name(type(loaded.config)).items()}
    if problem.where or problem.option not in fields:
        return problem
    return replace(problem, where=loaded.origins[fields[problem.option]])
