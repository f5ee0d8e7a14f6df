"""Options that were set and change nothing: one table of what each needs to have an effect. One that was left at its
default, or set to nothing (off, 0, unset), is never reported."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from relax_cli.config.layers import Loaded, known
from relax_cli.config.model import flag, option_value, options_by_name
from relax_cli.config.placement import rollout_engine
from relax_cli.config.redact import redacted
from relax_cli.config.replaced import NEEDS, Need
from relax_cli.config.schema import Config, CriticSection, SglangSection
from relax_cli.config.text import in_json
from relax_cli.errors import Problem, ProblemKind, problem_kind
from relax_cli.plugin.records import Estimator

THEME = "Options without effect"
PPO_RECIPE = "start from a PPO recipe (`relax recipes list`)"
"""An estimator with a critic needs more than its name."""


@dataclass(frozen=True)
class Condition:
    """Options that only work under one condition."""

    kind: ProblemKind
    options: tuple[str, ...]
    works: Callable[[Config, Estimator], bool]
    needs: str
    """What they need, to follow "only works "."""
    fix: str


def _condition(
    rule: str,
    options: Collection[str],
    works: Callable[[Config, Estimator], bool],
    needs: str,
    fix: str,
    summary: str = "",
) -> Condition:
    kind = problem_kind(rule, THEME, summary or _sentence(options, needs), severity="warning")
    return Condition(kind, tuple(options), works, needs, fix)


def _sentence(options: Collection[str], needs: str) -> str:
    return f"{' and '.join(f'`{flag(name)}`' for name in options)} only work{_s(options)} {needs}."


def _s(options: Collection[str]) -> str:
    return "s" if len(options) == 1 else ""


def _by_option(need: Need) -> Condition:
    """The condition that another option has a value beside which they matter."""
    summary = " ".join(_sentence(each.ended, each.needs) for each in NEEDS if each.rule == need.rule)

    def works(config: Config, _: Estimator) -> bool:
        return not need.when(option_value(config, need.option))

    return _condition(need.rule, need.ended, works, need.needs, need.fix, summary)


def _on_servers(config: Config, _: Estimator) -> bool:
    return rollout_engine(config) == "sglang"


ESTIMATOR_OPTION_UNUSED = problem_kind(
    "estimator-option-unused",
    THEME,
    "An option of another estimator: clip ranges with `sapo`, GAE options or temperatures of SAPO with `grpo`.",
    severity="warning",
)
CONDITIONS: tuple[Condition, ...] = (
    _condition(
        "critic-option-unused",
        CriticSection.model_fields,
        lambda _, estimator: estimator.needs_critic,
        "with an estimator that has a critic",
        PPO_RECIPE,
        "Options of the critic, and an estimator without one.",
    ),
    _condition(
        "ref-load-unused",
        ["ref_load"],
        lambda config, _: config.algorithm.needs_reference,
        "with a KL term, which compares with the reference model",
        "--use-kl-loss --kl-loss-type low_var_kl, or --kl-coef 0.001",
    ),
    _condition(
        "lora-option-unused",
        ["lora_alpha", "lora_targets"],
        lambda config, _: bool(config.model.lora_rank or config.critic.critic_lora_rank),
        "with low-rank adapters",
        "--lora-rank 16",
    ),
    _condition(
        "sglang-option-unused",
        [*SglangSection.model_fields, "rollout_request_timeout"],
        _on_servers,
        "with SGLang servers",
        "--rollout-engine sglang",
        "Options of SGLang servers, and the embedded engine generates.",
    ),
    _condition(
        "over-sampling-unused",
        ["over_sampling_batch_size"],
        lambda config, _: config.batch.dynamic_sampling or config.rollout.partial_rollout,
        "with dynamic sampling or partial rollouts",
        "--dynamic-sampling",
        "`--over-sampling-batch-size` only works with `--dynamic-sampling` or `--partial-rollout`.",
    ),
    _condition(
        "partial-rollout-unused",
        ["partial_rollout"],
        lambda config, estimator: config.carries_over or _on_servers(config, estimator),
        "with an --over-sampling-batch-size above --rollout-batch-size, or with SGLang servers",
        "--rollout-engine sglang",
        "`--partial-rollout` only works where more prompts are in flight than a batch takes "
        "(`--over-sampling-batch-size`), or with SGLang servers, which may abort responses.",
    ),
    *map(_by_option, NEEDS),
)


def unused_options(config: Config, origins: Mapping[str, str], estimators: Mapping[str, Estimator]) -> list[Problem]:
    """A warning for each group of options that the user set without effect, in a configuration as it was given: the
    estimator's normalisation has warnings of its own."""
    name = config.algorithm.advantage_estimator
    chosen = estimators.get(name)
    if chosen is None:
        return []
    given = _given(config, origins)
    problems = [
        _problem(condition.kind, found, f"only work{_s(found)} {condition.needs}", condition.fix)
        for condition in CONDITIONS
        if known(partial(condition.works, config, chosen)) is False
        if (found := {option: given[option] for option in condition.options if option in given})
    ]
    foreign = {option: given[option] for option in given if option in foreign_options(name, estimators)}
    if foreign:
        able = sorted(e.name for e in estimators.values() if foreign.keys() <= e.options.model_fields.keys())
        alone = [other for other in able if not estimators[other].needs_critic]
        fix = f"--advantage-estimator {alone[0]}" if alone else PPO_RECIPE if able else ""
        problems.append(
            _problem(ESTIMATOR_OPTION_UNUSED, foreign, f"belong{_s(foreign)} to estimators other than {name}", fix)
        )
    return problems


def foreign_options(name: str, estimators: Mapping[str, Estimator]) -> set[str]:
    """Options that other estimators read, and the one called `name` does not."""
    own = estimators[name].options.model_fields.keys()
    return {option for other in estimators.values() for option in other.options.model_fields} - own


def of_other_estimators(loaded: Loaded, estimators: Mapping[str, Estimator]) -> list[str]:
    """Options without effect for the chosen estimator that were given in an earlier layer than it, such as a recipe's
    options of PPO before the flag `--advantage-estimator grpo`."""
    name = loaded.config.algorithm.advantage_estimator
    if name not in estimators or "advantage_estimator" not in loaded.layers:
        return []
    unused = foreign_options(name, estimators)
    if not estimators[name].needs_critic:
        unused |= CriticSection.model_fields.keys()
    chosen = loaded.layers["advantage_estimator"]
    return [option for option in unused - loaded.unread if loaded.layers.get(option, chosen) < chosen]


def _given(config: Config, origins: Mapping[str, str]) -> dict[str, str]:
    """Field name to `--flag value` of every option that some layer set to something."""
    found = {}
    for name, (section, _) in options_by_name(type(config)).items():
        value = config.model_dump(include={section: {name}})[section][name]
        if not origins[f"{section}.{name}"].startswith("default") and value:  # off, 0 and empty ask for no effect
            found[name] = flag(name) if value is True else f"{flag(name)} {in_json(redacted(section, name, value))}"
    return found


def _problem(kind: ProblemKind, found: Mapping[str, str], why: str, fix: str) -> Problem:
    names = [flag(option) for option in found]
    many = f"{', '.join(names[:-1])} and {names[-1]} change nothing: they"
    return kind(
        f"{many if len(names) > 1 else f'{names[0]} changes nothing: it'} {why}",
        option=names[0],
        got=", ".join(found.values()),
        fix=", or ".join(filter(None, [f"drop {'it' if len(names) == 1 else 'them'}", fix])),
    )
