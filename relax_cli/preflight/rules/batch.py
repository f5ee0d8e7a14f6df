"""Rules about how the samples of a rollout become optimizer steps and micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from relax_cli.config.schema import Config
from relax_cli.errors import Problem

if TYPE_CHECKING:
    from relax_cli.preflight.rules.files import Found

TRAINED_ROLES = ("actor", "critic", "reference")
"""Roles whose ranks form a Megatron tensor- and data-parallel grid."""


def batch_arithmetic(config: Config) -> Found:
    """`rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout`."""
    batch = config.batch
    samples, per_step, steps = batch.samples_per_rollout, batch.global_batch_size, batch.num_steps_per_rollout
    got = f"{batch.rollout_batch_size} prompts x {batch.n_samples_per_prompt} samples = {samples}"
    rule = "batch-arithmetic"
    if per_step is not None and steps is not None and samples != per_step * steps:
        return Problem(
            id=rule,
            message="the samples of a rollout are not those of its optimizer steps",
            fix="drop --num-steps-per-rollout, or make both sides equal",
            option="--global-batch-size",
            got=f"{got}; {per_step} x {steps} steps = {per_step * steps}",
            expected="equal products",
        )
    divisor = per_step if per_step is not None else steps
    if divisor is None or samples % divisor == 0:
        return None
    option = "--global-batch-size" if per_step is not None else "--num-steps-per-rollout"
    return Problem(
        id=rule,
        message=f"the samples of a rollout cannot be shared out evenly by {option}",
        fix=f"choose a divisor of {samples}",
        option=option,
        got=f"{got}; {option} {divisor}",
        expected=f"a divisor of {samples}",
    )


def batch_by_ranks(config: Config) -> Found:
    """Every data-parallel rank gets at least one sample of an optimizer step."""
    grid = config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    samples = config.batch.samples_per_step
    return [
        Problem(
            id="batch-smaller-than-ranks",
            message=f"an optimizer step has fewer samples than {role} has data-parallel ranks",
            fix="raise --rollout-batch-size, or lower --num-steps-per-rollout or the ranks in --resource",
            option="--resource",
            got=f"{samples} samples, {devices // grid} ranks",
            expected="at least one sample per rank",
        )
        for role, (_, devices) in config.parallel.resource.items()
        if role in TRAINED_ROLES and devices // grid > samples
    ]


def token_budget(config: Config) -> Found:
    """Dynamic micro-batches need a budget of tokens, and the longest sample has to fit it."""
    batch, rollout = config.batch, config.rollout
    if not batch.use_dynamic_batch_size:
        return None
    # The state after a truncated response is a token more.
    longest = (rollout.rollout_max_prompt_len or 0) + rollout.rollout_max_response_len
    longest += config.algorithm.bootstrap_truncated
    if batch.max_tokens_per_gpu is None:
        return Problem(
            id="token-budget-missing",
            message="dynamic micro-batches are filled up to a number of tokens, which is not given",
            fix=f"--max-tokens-per-gpu {4 * longest}, or drop --use-dynamic-batch-size",
            option="--max-tokens-per-gpu",
        )
    if longest <= batch.max_tokens_per_gpu:
        return None
    return Problem(
        id="token-budget-too-small",
        message="one sample may be longer than a whole micro-batch",
        fix=f"--max-tokens-per-gpu {longest}, or lower --rollout-max-response-len",
        option="--max-tokens-per-gpu",
        got=str(batch.max_tokens_per_gpu),
        expected=f"at least {longest}: {rollout.rollout_max_prompt_len or 0} (--rollout-max-prompt-len) + "
        f"{rollout.rollout_max_response_len} (--rollout-max-response-len)"
        + (" + 1 (--bootstrap-truncated)" if config.algorithm.bootstrap_truncated else ""),
    )


BATCH_RULES: tuple[Callable[[Config], Found], ...] = (batch_arithmetic, batch_by_ranks, token_budget)
