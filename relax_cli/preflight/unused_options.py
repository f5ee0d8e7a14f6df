"""Options that were set and change nothing: one table of what each needs to have an effect.

An option that was left at its default, or set to nothing (off, 0, unset), is never reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from relax_cli.config.layers import Loaded, known
from relax_cli.config.model import flag, options_by_name
from relax_cli.config.placement import rollout_engine
from relax_cli.config.redact import redacted
from relax_cli.config.replaced import EVALUATED
from relax_cli.config.schema import Config, CriticSection, SglangSection
from relax_cli.config.text import in_json
from relax_cli.errors import Problem, ProblemKind, problem_kind
from relax_cli.plugin.records import Estimator

THEME = "Options without effect"
PPO_RECIPE = "start from a PPO recipe (`relax recipes list`)"
"""An estimator with a critic needs more than its name."""
Works = Callable[[Config, Estimator], bool]


@dataclass(frozen=True)
class Condition:
    """Options that only work under one condition."""

    kind: ProblemKind
    options: tuple[str, ...]
    """Field names."""
    works: Works
    """Whether they have an effect under this configuration and estimator."""
    needs: str
    """What they need, to follow "only works "."""
    fix: str
    """What to type to make them work."""


def _only(id: str, options: str, works: Works, needs: str, fix: str, summary: str = "") -> Condition:
    """A condition whose text in `docs/rules.md` is `summary`, or else made of its options and what they need."""
    names = tuple(options.split())
    typed = [f"`{flag(name)}`" for name in names]
    text = summary or f"{' and '.join(typed)} only work{'s' * (len(names) == 1)} {needs}."
    return Condition(problem_kind(id, THEME, text, severity="warning"), names, works, needs, fix)


ESTIMATOR_OPTION_UNUSED = problem_kind(
    "estimator-option-unused",
    THEME,
    "An option of another estimator: clip ranges with `sapo`, GAE options or temperatures of SAPO with `grpo`.",
    severity="warning",
)
CONDITIONS: tuple[Condition, ...] = (
    _only(
        "critic-option-unused",
        " ".join(CriticSection.model_fields),
        lambda config, estimator: estimator.needs_critic,
        "with an estimator that has a critic",
        PPO_RECIPE,
        "Options of the critic, and an estimator without one.",
    ),
    _only(
        "episode-option-unused",
        "max_turns env_timeout",
        lambda config, _: config.episode.env is not None,
        "with multi-turn episodes",
        "--env FILE.py:Class",
    ),
    _only(
        "reward-option-unused",
        "reward_key rm_timeout",
        lambda config, _: config.episode.env is None,
        "with a reward; the rewards of episodes come from their environment",
        "--env-timeout SECONDS, or drop it",
    ),
    _only(
        "kl-option-unused",
        "kl_loss_coef kl_loss_type",
        lambda config, _: config.algorithm.use_kl_loss,
        "with a KL loss",
        "--use-kl-loss",
    ),
    _only(
        "per-token-loss-unused",
        "calculate_per_token_loss",
        lambda config, _: config.algorithm.loss_aggregation in (None, "token-mean"),
        "without another --loss-aggregation",
        "--loss-aggregation token-mean",
    ),
    _only(
        "ref-load-unused",
        "ref_load",
        lambda config, _: config.algorithm.needs_reference,
        "with a KL term, which compares with the reference model",
        "--use-kl-loss --kl-loss-type low_var_kl, or --kl-coef 0.001",
    ),
    _only(
        "tis-option-unused",
        "tis_clip tis_clip_low",
        lambda config, _: config.algorithm.use_tis,
        "with truncated importance sampling",
        "--use-tis",
    ),
    _only(
        "chat-option-unused",
        "chat_template_kwargs system_prompt",
        lambda config, _: config.data.apply_chat_template,
        "with the chat template",
        "--apply-chat-template",
    ),
    _only(
        "overlong-prompts-unused",
        "overlong_prompts",
        lambda config, _: config.rollout.rollout_max_prompt_len is not None,
        "with a limit",
        "--rollout-max-prompt-len 1024",
    ),
    _only(
        "min-lr-unused",
        "min_lr",
        lambda config, _: config.optimizer.lr_decay_style != "constant",
        "where the learning rate decays",
        "--lr-decay-style cosine",
    ),
    _only(
        "token-budget-unused",
        "max_tokens_per_gpu",
        lambda config, _: config.batch.use_dynamic_batch_size,
        "with micro-batches of a dynamic size",
        "--use-dynamic-batch-size",
    ),
    _only(
        "micro-batch-size-unused",
        "micro_batch_size",
        lambda config, _: not config.batch.use_dynamic_batch_size,
        "without --use-dynamic-batch-size, which fills micro-batches by tokens",
        "--no-use-dynamic-batch-size",
    ),
    RECOMPUTED_LAYERS := _only(
        "recompute-option-unused",
        "recompute_method recompute_num_layers",
        lambda config, _: config.parallel.recompute_granularity == "full",
        "with full recomputation",
        "--recompute-granularity full",
        "`--recompute-method` or `--recompute-num-layers` without `--recompute-granularity full`, or "
        "`--recompute-modules` without `selective`.",
    ),
    Condition(
        RECOMPUTED_LAYERS.kind,
        ("recompute_modules",),
        lambda config, _: config.parallel.recompute_granularity == "selective",
        "with selective recomputation",
        "--recompute-granularity selective",
    ),
    _only(
        "sequence-parallel-unused",
        "sequence_parallel",
        lambda config, _: config.parallel.tensor_model_parallel_size > 1,
        "with tensor parallelism",
        "raise --tensor-model-parallel-size",
    ),
    _only(
        "cpu-offload-unused",
        "optimizer_cpu_offload",
        lambda config, _: config.parallel.device != "cpu",
        "where the model is not in the host's memory anyway",
        "--device cuda",
    ),
    _only(
        "num-epoch-unused",
        "num_epoch",
        lambda config, _: config.batch.num_rollout is None,
        "without --num-rollout, which already sets the length of the run",
        "drop --num-rollout",
    ),
    _only(
        "save-option-unused",
        "keep_checkpoints on_save_error",
        lambda config, _: config.checkpoint.save is not None,
        "where checkpoints are saved",
        "--save DIR",
    ),
    _only(
        "eval-option-unused",
        " ".join(EVALUATED),
        lambda config, _: bool(config.eval.eval_prompt_data),
        "with held-out prompts",
        "--eval-prompt-data NAME PATH",
    ),
    _only(
        "sglang-option-unused",
        " ".join((*SglangSection.model_fields, "rollout_request_timeout", "partial_rollout")),
        lambda config, _: rollout_engine(config.rollout, config.sglang, config.parallel) == "sglang",
        "with SGLang servers",
        "--rollout-engine sglang",
        "Options of SGLang servers, and the embedded engine generates.",
    ),
    _only(
        "ray-option-unused",
        "ray_num_cpus queue_timeout",
        lambda config, _: config.parallel.launcher == "ray",
        "with Ray",
        "--launcher ray",
    ),
)


def unused_options(config: Config, origins: Mapping[str, str], estimators: Mapping[str, Estimator]) -> list[Problem]:
    """A warning for each group of options that the user set without effect.

    Args:
        config: as it was given, before the estimator's normalisation, which has warnings of its own.
        origins: `section.key` to the layer that gave the value.
        estimators: by name. Where the chosen one is not among them there is nothing to say.
    """
    name = config.algorithm.advantage_estimator
    chosen = estimators.get(name)
    if chosen is None:
        return []
    given = _given(config, origins)
    problems = [
        _problem(condition.kind, found, f"only work{_s(found)} {condition.needs}", condition.fix)
        for condition in CONDITIONS
        if _is_idle(condition, config, chosen)
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


def _is_idle(condition: Condition, config: Config, estimator: Estimator) -> bool:
    return known(lambda: condition.works(config, estimator)) is False


def _given(config: Config, origins: Mapping[str, str]) -> dict[str, str]:
    """Field name to `--flag value` of every option that some layer set to something."""
    found = {}
    for name, (section, _) in options_by_name(type(config)).items():
        value = config.model_dump(include={section: {name}})[section][name]
        if not origins[f"{section}.{name}"].startswith("default") and value:  # off, 0 and empty ask for no effect
            found[name] = flag(name) if value is True else f"{flag(name)} {in_json(redacted(section, name, value))}"
    return found


def _s(options: Mapping[str, str]) -> str:
    return "s" if len(options) == 1 else ""


def _problem(kind: ProblemKind, found: Mapping[str, str], why: str, fix: str) -> Problem:
    names = [flag(option) for option in found]
    many = f"{', '.join(names[:-1])} and {names[-1]} change nothing: they"
    return kind(
        f"{many if len(names) > 1 else f'{names[0]} changes nothing: it'} {why}",
        option=names[0],
        got=", ".join(found.values()),
        fix=", or ".join(filter(None, [f"drop {'it' if len(names) == 1 else 'them'}", fix])),
    )
