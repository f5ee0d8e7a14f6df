"""Options that were set and change nothing: one table of what each needs to have an effect.

A silent option is worse than a refused one, since the run is not the one that was asked for. An option that was left at
its default, or set to nothing (off, 0, unset), is never reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from relax_cli.config.model import EstimatorOptions, flag, options_by_name
from relax_cli.config.placement import rollout_engine
from relax_cli.config.redact import redacted
from relax_cli.config.schema import Config, CriticSection, SglangSection
from relax_cli.errors import Problem


@dataclass(frozen=True)
class Effect:
    """Options that work only under one condition."""

    rule: str
    options: tuple[str, ...]
    """Field names."""
    works: Callable[[Config, EstimatorOptions], bool]
    """Whether they have an effect under this configuration and estimator."""
    needs: str
    """What they need, to follow "only works "."""
    fix: str
    """What to type to make them work."""


def _effect(
    rule: str,
    options: Iterable[str],
    works: Callable[[Config, EstimatorOptions], bool],
    needs: str,
    fix: str,
) -> Effect:
    return Effect(rule, tuple(options), works, needs, fix)


EFFECTS: tuple[Effect, ...] = (
    _effect(
        "critic-option-unused",
        CriticSection.model_fields,
        lambda config, estimator: estimator.needs_critic,
        "with an estimator that has a critic",
        "--advantage-estimator ppo",
    ),
    _effect(
        "kl-option-unused",
        ("kl_loss_coef", "kl_loss_type"),
        lambda config, _: config.algorithm.use_kl_loss,
        "with a KL loss",
        "--use-kl-loss",
    ),
    _effect(
        "ref-load-unused",
        ("ref_load",),
        lambda config, _: config.algorithm.needs_reference,
        "with a KL term, which compares with the reference model",
        "--use-kl-loss --kl-loss-type low_var_kl, or --kl-coef 0.001",
    ),
    _effect(
        "tis-option-unused",
        ("tis_clip", "tis_clip_low"),
        lambda config, _: config.algorithm.use_tis,
        "with truncated importance sampling",
        "--use-tis",
    ),
    _effect(
        "min-lr-unused",
        ("min_lr",),
        lambda config, _: config.optimizer.lr_decay_style != "constant",
        "where the learning rate decays",
        "--lr-decay-style cosine",
    ),
    _effect(
        "token-budget-unused",
        ("max_tokens_per_gpu",),
        lambda config, _: config.batch.use_dynamic_batch_size,
        "with micro-batches of a dynamic size",
        "--use-dynamic-batch-size",
    ),
    _effect(
        "micro-batch-size-unused",
        ("micro_batch_size",),
        lambda config, _: not config.batch.use_dynamic_batch_size,
        "without --use-dynamic-batch-size, which fills micro-batches by tokens",
        "--no-use-dynamic-batch-size",
    ),
    _effect(
        "recompute-option-unused",
        ("recompute_method", "recompute_num_layers"),
        lambda config, _: config.parallel.recompute_granularity == "full",
        "with full recomputation",
        "--recompute-granularity full",
    ),
    _effect(
        "recompute-option-unused",
        ("recompute_modules",),
        lambda config, _: config.parallel.recompute_granularity == "selective",
        "with selective recomputation",
        "--recompute-granularity selective",
    ),
    _effect(
        "sequence-parallel-unused",
        ("sequence_parallel",),
        lambda config, _: config.parallel.tensor_model_parallel_size > 1,
        "with tensor parallelism",
        "--tensor-model-parallel-size 2",
    ),
    _effect(
        "cpu-offload-unused",
        ("optimizer_cpu_offload",),
        lambda config, _: config.parallel.device != "cpu",
        "where the model is not in the host's memory anyway",
        "--device cuda",
    ),
    _effect(
        "num-epoch-unused",
        ("num_epoch",),
        lambda config, _: config.batch.num_rollout is None,
        "where --num-rollout does not already say how long to train",
        "leave --num-rollout out",
    ),
    _effect(
        "save-option-unused",
        ("keep_checkpoints", "on_save_error"),
        lambda config, _: config.checkpoint.save is not None,
        "where checkpoints are saved",
        "--save DIR",
    ),
    _effect(
        "eval-option-unused",
        ("n_samples_per_eval_prompt",),
        lambda config, _: bool(config.eval.eval_prompt_data),
        "with held-out prompts",
        "--eval-prompt-data NAME PATH",
    ),
    _effect(
        "sglang-option-unused",
        (*SglangSection.model_fields, "rollout_request_timeout", "partial_rollout"),
        lambda config, _: rollout_engine(config.rollout, config.sglang, config.parallel) == "sglang",
        "with SGLang servers",
        "--rollout-engine sglang",
    ),
    _effect(
        "ray-option-unused",
        ("ray_num_cpus", "queue_timeout"),
        lambda config, _: config.parallel.launcher == "ray",
        "with Ray",
        "--launcher ray",
    ),
)


def unused_options(
    config: Config, origins: Mapping[str, str], estimators: Mapping[str, EstimatorOptions]
) -> list[Problem]:
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
        _problem(
            effect.rule,
            found,
            f"only work{_s(found)} {effect.needs}",
            effect.fix,
        )
        for effect in EFFECTS
        if not effect.works(config, chosen)
        if (found := {option: given[option] for option in effect.options if option in given})
    ]
    readers = {other: set(estimator.options.model_fields) for other, estimator in estimators.items()}
    foreign = {
        option: text
        for option, text in given.items()
        if option not in readers[name] and any(option in names for names in readers.values())
    }
    if foreign:
        able = sorted(other for other, names in readers.items() if foreign.keys() <= names)
        fix = f"--advantage-estimator {able[0]}" if able else ""
        problems.append(
            _problem("estimator-option-unused", foreign, f"belong{_s(foreign)} to estimators other than {name}", fix)
        )
    return problems


def _given(config: Config, origins: Mapping[str, str]) -> dict[str, str]:
    """Field name to `--flag value` of every option that some layer set to something."""
    found = {}
    for name, (section, _) in options_by_name(type(config)).items():
        value = config.model_dump(include={section: {name}})[section][name]
        if origins[f"{section}.{name}"] != "default" and not _says_nothing(value):
            found[name] = flag(name) if value is True else f"{flag(name)} {redacted(section, name, value)}"
    return found


def _says_nothing(value: Any) -> bool:
    """Off, 0, unset, empty: what has no effect is what was asked for."""
    return not value


def _s(options: Mapping[str, str]) -> str:
    return "s" if len(options) == 1 else ""


def _problem(rule: str, found: Mapping[str, str], why: str, fix: str) -> Problem:
    names = [flag(option) for option in found]
    return Problem(
        id=rule,
        message=f"{' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))} change{_s(found)} nothing: "
        f"{'it' if len(names) == 1 else 'they'} {why}",
        option=names[0],
        got=", ".join(found.values()),
        fix=" or ".join(filter(None, [fix, f"drop {'it' if len(names) == 1 else 'them'}"])),
        severity="warning",
    )
