"""Rules about how the samples of a rollout become optimizer steps, and how long the run is."""

from __future__ import annotations

from relax_cli.config.schema import BatchSection, Config
from relax_cli.preflight.inputs import RunInputs
from relax_cli.preflight.rules.registry import Finding, Found, largest_divisor, rule
from relax_cli.preflight.rules.resources import TRAINED_ROLES

THEME = "Batches and length of the run"


@rule("batch-arithmetic", THEME, option="--global-batch-size")
def batch_arithmetic(batch: BatchSection) -> Found:
    """`rollout_batch_size × n_samples_per_prompt` must equal `global_batch_size × num_steps_per_rollout`."""
    samples, per_step, steps = batch.samples_per_rollout, batch.global_batch_size, batch.num_steps_per_rollout
    got = f"{batch.rollout_batch_size} prompts × {batch.n_samples_per_prompt} samples = {samples}"
    if per_step is not None and steps is not None:
        if samples != per_step * steps:
            fix = "drop --num-steps-per-rollout, or make both sides equal"
            yield Finding("", fix, f"{got}; {per_step} × {steps} steps = {per_step * steps}", "equal products")
    elif (divisor := per_step or steps) and samples % divisor:
        option = "--global-batch-size" if per_step else "--num-steps-per-rollout"
        yield Finding(
            f"rollout_batch_size × n_samples_per_prompt must be a multiple of {option}",
            option=option,
            got=f"{got}; {option} {divisor}",
            expected=f"a divisor of {samples}",
            fix=f"{option} {largest_divisor(samples, divisor)}",
        )


@rule("dynamic-sampling-groups", THEME, option="--dynamic-sampling")
def dynamic_sampling_groups(batch: BatchSection) -> Found:
    """`--dynamic-sampling` compares the rewards of one prompt's samples, so each needs at least two."""
    if batch.dynamic_sampling and batch.n_samples_per_prompt < 2:
        got = f"--n-samples-per-prompt {batch.n_samples_per_prompt}"
        yield Finding(fix="--n-samples-per-prompt 8, or --no-dynamic-sampling", got=got, expected="at least 2")


@rule("over-sampling-too-small", THEME, option="--over-sampling-batch-size")
def over_sampling_too_small(config: Config) -> Found:
    """One round of `--dynamic-sampling`, or what is in flight with `--partial-rollout`, must be able to fill the batch:
    `--over-sampling-batch-size` is at least `--rollout-batch-size`."""
    batch = config.batch.rollout_batch_size
    if config.prompts_per_round < batch:
        message, fix = "fewer prompts are drawn at a time than a rollout trains on", "drop --over-sampling-batch-size"
        yield Finding(message, fix, expected=f"at least --rollout-batch-size {batch}")


@rule("partial-rollout-env", THEME, option="--partial-rollout")
def partial_rollout_env(config: Config) -> Found:
    """Episodes (`--env`) are not carried over: their environments cannot be saved. `--partial-rollout` with
    `--over-sampling-batch-size` is for single responses."""
    if config.carries_over and config.episode.env is not None:
        message = "multi-turn episodes cannot continue in the next rollout"
        yield Finding(message, "--no-partial-rollout", f"--env {config.episode.env}")


@rule("partial-rollout-uncorrected", THEME, option="--partial-rollout", severity="warning")
def partial_rollout_uncorrected(config: Config) -> Found:
    """A warning: responses that are carried over have tokens of earlier weights, and nothing in the loss says so. With
    `--use-rollout-logprobs` the ratio compares with the weights that sampled each token; `--use-tis` weighs them."""
    algorithm = config.algorithm
    if config.carries_over and not (algorithm.use_rollout_logprobs or algorithm.use_tis):
        yield Finding(fix="--use-rollout-logprobs", got="neither --use-rollout-logprobs nor --use-tis")


@rule("batch-smaller-than-ranks", THEME, option="--resource")
def batch_smaller_than_ranks(config: Config) -> Found:
    """Every data-parallel rank needs at least one sample of an optimizer step."""
    for role, (_, devices) in config.parallel.resource.items():
        samples, ranks = config.batch.samples_per_step, devices // config.parallel.grid
        if role in TRAINED_ROLES and ranks > samples:
            fix = "raise --rollout-batch-size, or lower --num-steps-per-rollout or the ranks in --resource"
            yield Finding(fix=fix, got=f"{samples} samples, {ranks} data-parallel ranks of {role}")


@rule("token-budget-missing", THEME, option="--max-tokens-per-gpu")
def token_budget_missing(config: Config) -> Found:
    """`--use-dynamic-batch-size` fills micro-batches up to `--max-tokens-per-gpu` tokens, which is not set."""
    if config.batch.use_dynamic_batch_size and config.batch.max_tokens_per_gpu is None:
        longest = _longest_sample(config, config.rollout.rollout_max_prompt_len or 0)
        yield Finding(fix=f"--max-tokens-per-gpu {4 * longest}, or drop --use-dynamic-batch-size")


@rule("token-budget-too-small", THEME, option="--max-tokens-per-gpu")
def token_budget_too_small(config: Config, inputs: RunInputs) -> Found:
    """Prompt and response of one sample, or a context-parallel rank's part of them, may be longer than
    `--max-tokens-per-gpu`. Padding counts: a micro-batch that is not packed costs its number of samples × its longest
    one."""
    rollout, budget, ranks = config.rollout, config.batch.max_tokens_per_gpu, config.parallel.context_parallel_size
    prompt = rollout.rollout_max_prompt_len or inputs.longest_prompt or 0
    longest = config.parallel.tokens_of_rank(_longest_sample(config, prompt))
    if config.batch.use_dynamic_batch_size and budget is not None and longest > budget:
        origin = "--rollout-max-prompt-len" if rollout.rollout_max_prompt_len else "the longest prompt"
        terms = f"{prompt} ({origin}) + {rollout.rollout_max_response_len} (--rollout-max-response-len)"
        terms += " + 1 (--bootstrap-truncated)" * config.algorithm.bootstrap_truncated
        terms += f", on {ranks} ranks" * (ranks > 1)
        fix = f"--max-tokens-per-gpu {longest}, or lower --rollout-max-response-len"
        yield Finding("one sample may be longer than a whole micro-batch", fix, expected=f"at least {longest}: {terms}")


def _longest_sample(config: Config, prompt: int) -> int:
    # With bootstrapping, the state after a truncated response is one token more.
    return prompt + config.rollout.rollout_max_response_len + config.algorithm.bootstrap_truncated


@rule("run-length-missing", THEME, option="--num-rollout")
def run_length_missing(batch: BatchSection) -> Found:
    """Set `--num-rollout` or `--num-epoch`."""
    if batch.num_rollout is None and batch.num_epoch is None:
        yield Finding("the length of the run is not set", fix="add --num-rollout 20, or --num-epoch 1")
