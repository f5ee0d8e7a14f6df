"""Options that exclude each other follow the layers: a value of a later layer ends what earlier layers say against it.

A flag's `--custom-rm-path` replaces a recipe's `rm_type`, `--num-epoch` a recipe's `num_rollout`. Within one layer
nothing is replaced: there both were meant, and rules judge them together.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from relax_cli.config.held_out import OF_A_SET


@dataclass(frozen=True)
class Replacement:
    """What a value of one option ends in the layers before it."""

    option: str
    when: Callable[[Any], bool]
    """Of the value."""
    ended: tuple[str, ...]
    """Options that would contradict the value, or only matter without it."""


@dataclass(frozen=True)
class Need(Replacement):
    """Options `ended` that have no effect beside some values of `option`."""

    rule: str
    needs: str
    """What the options need, to follow "only work "."""
    fix: str


def _given(value: Any) -> bool:
    return value is not None


_on, _off = bool, operator.not_


def _need(options: str, option: str, works: Callable[[Any], bool], rule: str, needs: str, fix: str) -> Need:
    return Need(option, lambda value: not works(value), tuple(options.split()), rule, needs, fix)


EVALUATED = (*OF_A_SET.values(), "eval_sampling", "eval_pass_reward")
EPISODES = ("env", "max_turns", "env_timeout")

NEEDS = (
    _need("kl_loss_coef kl_loss_type", "use_kl_loss", _on, "kl-option-unused", "with a KL loss", "--use-kl-loss"),
    _need("tis_clip tis_clip_low", "use_tis", _on, "tis-option-unused", "with importance sampling", "--use-tis"),
    _need(
        "calculate_per_token_loss", "loss_aggregation", lambda value: value in (None, "token-mean"),
        "per-token-loss-unused", "without another --loss-aggregation", "--loss-aggregation token-mean",
    ),
    _need(
        "min_lr", "lr_decay_style", lambda value: value != "constant",
        "min-lr-unused", "where the learning rate decays", "--lr-decay-style cosine",
    ),
    _need(
        "dynamic_sampling_max_rounds", "dynamic_sampling", _on,
        "dynamic-sampling-unused", "with dynamic sampling", "--dynamic-sampling",
    ),
    _need(
        "partial_rollout_len", "partial_rollout", _on,
        "partial-rollout-len-unused", "with partial rollouts", "--partial-rollout",
    ),
    _need(
        "max_tokens_per_gpu", "use_dynamic_batch_size", _on,
        "token-budget-unused", "with micro-batches of a dynamic size", "--use-dynamic-batch-size",
    ),
    _need(
        "micro_batch_size", "use_dynamic_batch_size", _off,
        "micro-batch-size-unused", "without --use-dynamic-batch-size, which fills micro-batches by tokens",
        "--no-use-dynamic-batch-size",
    ),
    _need(
        "recompute_method recompute_num_layers", "recompute_granularity", lambda value: value == "full",
        "recompute-option-unused", "with full recomputation", "--recompute-granularity full",
    ),
    _need(
        "recompute_modules", "recompute_granularity", lambda value: value == "selective",
        "recompute-option-unused", "with selective recomputation", "--recompute-granularity selective",
    ),
    _need(
        "sequence_parallel", "tensor_model_parallel_size", lambda value: value not in (1, "1"),
        "sequence-parallel-unused", "with tensor parallelism", "raise --tensor-model-parallel-size",
    ),
    _need(
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers", "pipeline_model_parallel_size",
        lambda value: value not in (1, "1"),
        "pipeline-option-unused", "with several pipeline stages", "raise --pipeline-model-parallel-size",
    ),
    _need(
        "optimizer_cpu_offload", "device", lambda value: value != "cpu",
        "cpu-offload-unused", "where the model is not in the host's memory anyway", "--device cuda",
    ),
    _need(
        "cpu_matmul_precision", "device", lambda value: value != "cuda",
        "cpu-matmul-precision-unused", "on a CPU; on a GPU everything is computed in bf16", "--device cpu",
    ),
    _need(
        "num_epoch", "num_rollout", lambda value: value is None,
        "num-epoch-unused", "without --num-rollout, which already sets the length of the run", "drop --num-rollout",
    ),
    _need(
        "keep_checkpoints keep_best on_save_error async_save", "save", _on,
        "save-option-unused", "where checkpoints are saved", "--save DIR",
    ),
    _need(
        " ".join(EVALUATED), "eval_prompt_data", _on,
        "eval-option-unused", "with held-out prompts", "--eval-prompt-data NAME PATH",
    ),
    _need(
        "max_turns env_timeout", "env", _on,
        "episode-option-unused", "with multi-turn episodes", "--env FILE.py:Class",
    ),
    _need(
        "reward_key rm_timeout reward_on_error", "env", _off,
        "reward-option-unused", "with a reward; the rewards of episodes come from their environment",
        "--env-timeout SECONDS",
    ),
    _need(
        "chat_template_kwargs system_prompt", "apply_chat_template", _on,
        "chat-option-unused", "with the chat template", "--apply-chat-template",
    ),
    _need(
        "overlong_buffer_len", "overlong_penalty", _on,
        "overlong-buffer-unused", "with a penalty", "--overlong-penalty 1",
    ),
    _need(
        "overlong_prompts", "rollout_max_prompt_len", _given,
        "overlong-prompts-unused", "with a limit", "--rollout-max-prompt-len TOKENS",
    ),
    _need(
        "ray_num_cpus queue_timeout", "launcher", lambda value: value == "ray",
        "ray-option-unused", "with Ray", "--launcher ray",
    ),
)  # fmt: skip
"""Options that only matter beside a value of another; in one layer with it, they are reported as without effect."""

REPLACEMENTS = (
    *NEEDS,
    Replacement("rm_type", _given, ("custom_rm_path", *EPISODES)),
    Replacement("rm_type", lambda value: "remote" not in str(value), ("rm_url",)),
    Replacement("custom_rm_path", _given, ("rm_type", "rm_url", *EPISODES)),
    Replacement("env", _given, ("rm_type", "custom_rm_path", "rm_url")),
    Replacement("num_epoch", _given, ("num_rollout",)),
    Replacement("dynamic_sampling", _off, ("over_sampling_batch_size",)),
    Replacement("global_batch_size", _given, ("num_steps_per_rollout",)),
    Replacement("num_steps_per_rollout", _given, ("global_batch_size",)),
    Replacement("micro_batch_size", _given, ("use_dynamic_batch_size", "max_tokens_per_gpu")),
    Replacement("eval_prompt_data", _off, ("eval_interval",)),
    Replacement("eval_interval", _off, ("eval_prompt_data", *EVALUATED)),
    Replacement("save", _off, ("save_interval", "critic_save")),
    Replacement("rollout_engine", lambda value: value == "embedded", ("rollout_external",)),
    Replacement("rollout_external", _on, ("rollout_engine",)),
    Replacement("rollout_external", _off, ("rollout_external_engine_addrs",)),
    Replacement("calculate_per_token_loss", _on, ("loss_aggregation",)),
    Replacement("device", lambda value: value == "cuda", ("overlap_updates",)),
)


def ended_options(values: Mapping[str, tuple[int, Any]]) -> dict[str, str]:
    """Options whose value was ended by a later layer, and by which option. Of each, `values` has layer and value."""
    ended: dict[str, str] = {}
    for replacement in REPLACEMENTS:
        layer, value = values.get(replacement.option, (-1, None))
        if layer >= 0 and replacement.when(value):
            earlier = (name for name in replacement.ended if name in values and values[name][0] < layer)
            ended |= dict.fromkeys(earlier, replacement.option)
    return ended
