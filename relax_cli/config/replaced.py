"""Options that exclude each other follow the layers: a value of a later layer ends what earlier layers say against it.

A flag's `--custom-rm-path` replaces a recipe's `rm_type`, `--num-epoch` a recipe's `num_rollout`. Within one layer
nothing is replaced: there both were meant, and rules judge them together.
"""

from __future__ import annotations

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


def _given(value: Any) -> bool:
    return value is not None


def _off(value: Any) -> bool:
    return not value


def _on(value: Any) -> bool:
    return bool(value)


EVALUATED = (*OF_A_SET.values(), "eval_sampling", "eval_pass_reward")
RECOMPUTED = ("recompute_method", "recompute_num_layers")
EPISODES = ("env", "max_turns", "env_timeout")
CHECKPOINTS = ("save_interval", "keep_checkpoints", "on_save_error", "critic_save")

REPLACEMENTS = (
    Replacement("rm_type", _given, ("custom_rm_path", *EPISODES)),
    Replacement("rm_type", lambda value: value != "remote", ("rm_url",)),
    Replacement("custom_rm_path", _given, ("rm_type", "rm_url", *EPISODES)),
    Replacement("env", _given, ("rm_type", "custom_rm_path", "rm_url", "reward_key", "rm_timeout")),
    Replacement("env", _off, ("max_turns", "env_timeout")),
    Replacement("num_epoch", _given, ("num_rollout",)),
    Replacement("num_rollout", _given, ("num_epoch",)),
    Replacement("global_batch_size", _given, ("num_steps_per_rollout",)),
    Replacement("num_steps_per_rollout", _given, ("global_batch_size",)),
    Replacement("micro_batch_size", _given, ("use_dynamic_batch_size", "max_tokens_per_gpu")),
    Replacement("use_dynamic_batch_size", _on, ("micro_batch_size",)),
    Replacement("use_dynamic_batch_size", _off, ("max_tokens_per_gpu",)),
    Replacement("lr_decay_style", lambda value: value == "constant", ("min_lr",)),
    Replacement("use_kl_loss", _off, ("kl_loss_coef", "kl_loss_type")),
    Replacement("use_tis", _off, ("tis_clip", "tis_clip_low")),
    Replacement("eval_prompt_data", _off, ("eval_interval", *EVALUATED)),
    Replacement("eval_interval", _off, ("eval_prompt_data", *EVALUATED)),
    Replacement("save", _off, CHECKPOINTS),
    Replacement("recompute_granularity", lambda value: value != "full", RECOMPUTED),
    Replacement("recompute_granularity", lambda value: value != "selective", ("recompute_modules",)),
    Replacement("tensor_model_parallel_size", lambda value: value == 1, ("sequence_parallel",)),
    Replacement("rollout_engine", lambda value: value == "embedded", ("rollout_external",)),
    Replacement("rollout_external", _on, ("rollout_engine",)),
    Replacement("rollout_external", _off, ("rollout_external_engine_addrs",)),
    Replacement("loss_aggregation", _given, ("calculate_per_token_loss",)),
    Replacement("calculate_per_token_loss", _on, ("loss_aggregation",)),
    Replacement("device", lambda value: value == "cuda", ("overlap_updates",)),
)


def ended_options(values: Mapping[str, tuple[int, Any]]) -> dict[str, str]:
    """Options whose value was ended by a later layer, and by which option.

    Args:
        values: option to the number of the layer that it comes from, and its value.
    """
    ended = {}
    for replacement in REPLACEMENTS:
        layer, value = values.get(replacement.option, (-1, None))
        if layer < 0 or not replacement.when(value):
            continue
        ended.update(
            {name: replacement.option for name in replacement.ended if name in values and values[name][0] < layer}
        )
    return ended
