"""From what was typed to a complete configuration, with what was changed in it and why."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from relax_cli.config.layers import Layers, UnreadOption, load_config
from relax_cli.config.model import flag, options_by_name
from relax_cli.config.placement import has_counts, shared_bundles
from relax_cli.config.redact import placeholder, redacted
from relax_cli.config.schema import Config, ParallelSection, SglangSection
from relax_cli.errors import ConfigError, Problem
from relax_cli.plugin.config_model import config_model, estimator_options
from relax_cli.plugin.graph import ServiceGraph
from relax_cli.plugin.manager import Plugins
from relax_cli.plugin.records import Change
from relax_cli.preflight.completion import complete, without_unused_roles
from relax_cli.preflight.machine import Machine
from relax_cli.preflight.unused_options import of_other_estimators, unused_options

GROUP_SIZE = 8
"""Samples per prompt where an estimator compares the samples of a group and the option is unset."""


@dataclass(frozen=True)
class Resolved:
    """A configuration after normalisation."""

    given: Config
    """Before normalisation."""
    config: Config
    origins: dict[str, str]
    """`section.key` to the layer that gave the value, before normalisation."""
    changes: tuple[Change, ...]
    problems: tuple[Problem, ...]
    unread: frozenset[str]
    """Options whose value is not known, because it has a problem; to look at one raises `UnreadOption`."""
    is_read: bool
    """Whether the configuration is what was given: every recipe, name and value could be read."""
    graph: ServiceGraph | None
    """None where the roles of the run are not known."""

    def locate(self, problem: Problem) -> Problem:
        """The problem with the origin of the option it blames."""
        fields = {flag(name): f"{section}.{name}" for name, (section, _) in options_by_name(type(self.config)).items()}
        if problem.where or problem.option not in fields:
            return problem
        return replace(problem, where=self.origins[fields[problem.option]])


def resolve(
    plugins: Plugins, layers: Layers, machine: Machine | None, cluster_gpus: Callable[[], int] | None
) -> Resolved:
    """Merge the layers, choose the device (`--device auto` stays without a machine), and let the estimator normalise
    the result. Raises ConfigError: two plugins claim one name, so that there are no options at all."""
    loaded = load_config(layers, config_model(plugins.estimators().values()))
    with contextlib.suppress(UnreadOption):
        loaded = loaded.without(of_other_estimators(loaded, plugins.estimators()))
    given, changes, problems = loaded.config, list[Change](), list(loaded.problems)
    origins = dict(loaded.origins)
    with contextlib.suppress(UnreadOption):
        given = _with_group_size(given, plugins, origins)
    with contextlib.suppress(UnreadOption):
        if machine is not None and has_counts(given):
            given, changes = settle_device(given, machine, installed_torch_has_cuda(), cluster_gpus)
    config = given
    with contextlib.suppress(UnreadOption):
        config, made, found = _apply_estimator(plugins, given)
        changes += made
        problems += found
    graph = None
    try:
        graph = plugins.service_graph(config)
        config, made = without_unused_roles(config, graph)
        changes += made
    except ConfigError as error:
        problems += [problem for problem in error.problems if problem not in problems]
    with contextlib.suppress(UnreadOption):
        problems += unused_options(given, origins, plugins.estimators())
    is_read = all(problem.severity == "warning" for problem in loaded.problems)
    return Resolved(given, config, origins, tuple(map(_shown, changes)), tuple(problems), loaded.unread, is_read, graph)


def _with_group_size(config: Config, plugins: Plugins, origins: dict[str, str]) -> Config:
    """The configuration with `GROUP_SIZE` samples per prompt, where the estimator needs a group and none was given."""
    name, option = config.algorithm.advantage_estimator, "batch.n_samples_per_prompt"
    estimator = plugins.estimators().get(name)
    if estimator is None or not estimator.needs_groups or origins[option] != "default":
        return config
    origins[option] = f"default of {name}"
    batch = config.batch.model_copy(update={"n_samples_per_prompt": GROUP_SIZE})
    return config.model_copy(update={"batch": batch})


def _apply_estimator(plugins: Plugins, config: Config) -> tuple[Config, list[Change], list[Problem]]:
    """What the chosen estimator's plugin makes of the configuration, or why there is no such plugin."""
    try:
        estimator = plugins.estimator(config.algorithm.advantage_estimator)
        estimator_options(config, estimator)
    except UnreadOption:
        raise
    except ConfigError as error:
        return config, [], list(error.problems)
    normalised = plugins.normalize(config)
    config, changes = complete(normalised.config, has_critic=estimator.needs_critic)
    return config, [*normalised.changes, *changes], [*normalised.warnings, *plugins.check(config)]


def command_words(layers: Layers, model: type[Config]) -> tuple[str, ...]:
    """Words after `relax train` that give the same configuration, `RELAX_*` values included as `--set`; secrets are
    `relax_cli.config.redact.placeholder`s."""
    words = [word for recipe in layers.recipes for word in ("--recipe", recipe)]
    options = options_by_name(model)
    for name, (section, _) in options.items():
        variable = f"RELAX_{name.upper()}"
        if variable in layers.env:
            words += ["--set", f"{section}.{name}={_typed(section, name, layers.env[variable])}"]
    for override in layers.overrides:
        path, _, text = override.partition("=")
        section, _, name = path.strip().partition(".")
        words += ["--set", f"{path}={_typed(section, name, text)}"]
    for name, value in layers.flags.items():
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        elif value is not None:
            values = value if isinstance(value, list | tuple) else [value]
            words += [word for item in values for word in (flag(name), _typed(options[name][0], name, item))]
    return tuple(words)


def _typed(section: str, name: str, value: Any) -> str:
    """A value as it is typed again; one that contains a secret is left to a variable of the shell."""
    text = json.dumps(value) if isinstance(value, Mapping) else str(value)
    return text if redacted(section, name, text) == text else placeholder(name)


def _shown(change: Change) -> Change:
    name = change.option.removeprefix("--").replace("-", "_")
    return replace(change, before=redacted("", name, change.before), after=redacted("", name, change.after))


def settle_device(
    config: Config, machine: Machine, torch_has_cuda: bool, cluster_gpus: Callable[[], int] | None
) -> tuple[Config, list[Change]]:
    """The configuration with `cpu` or `cuda` in the place of `auto`. `cluster_gpus` asks the cluster that the run would
    join how many GPUs it has; where it is None, `auto` stays."""
    parallel = config.parallel
    if parallel.device != "auto":
        return config, []
    joins = bool(machine.ray_address) and parallel.launcher == "ray"
    if joins and cluster_gpus is None:
        return config, []
    gpus = cluster_gpus() if joins and cluster_gpus is not None else machine.gpus
    place = "the Ray cluster" if joins else "this machine"
    device, why = choose_device(parallel, config.sglang, gpus, torch_has_cuda, place)
    settled = config.model_copy(update={"parallel": parallel.model_copy(update={"device": device})})
    return settled, [Change("--device", "auto", device, why)]


def choose_device(
    parallel: ParallelSection, sglang: SglangSection, gpus: int, torch_has_cuda: bool, place: str
) -> tuple[Literal["cpu", "cuda"], str]:
    """CUDA where the roles get as many GPUs as they need, and why or why not."""
    needed = shared_bundles(parallel, sglang)
    if gpus == 0:
        return "cpu", f"{place} has no GPU"
    count = f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"
    if gpus < needed:
        return "cpu", f"{place} has {count}, and the roles need {needed}"
    if not torch_has_cuda:
        return "cpu", f"{place} has {count}, but torch is built without CUDA"
    return "cuda", f"{place} has {count}, and the roles need {needed}"


def installed_torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build, read from its version file: importing it takes seconds."""
    package = importlib.util.find_spec("torch")
    if package is None or package.origin is None:
        return False
    try:
        text = Path(package.origin).with_name("version.py").read_text("utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\s*(?::[^=]*)?=\s*['\"]", text, re.MULTILINE) is not None
