"""Rules about what is optimised: coefficients and bounds that make no sense together."""

from __future__ import annotations

from relax_cli.config.schema import AlgorithmSection, OptimizerSection
from relax_cli.preflight.rules.registry import Finding, Found, rule

THEME = "Objective"


@rule("min-lr-above-lr", THEME, option="--min-lr")
def min_lr_above_lr(optimizer: OptimizerSection) -> Found:
    """With a decaying schedule `--min-lr` must not be above `--lr` (or `--critic-lr`)."""
    if optimizer.lr_decay_style != "constant" and optimizer.min_lr > optimizer.lr:
        yield Finding(
            "the learning rate would rise, not decay",
            got=f"{optimizer.min_lr:g}",
            expected=f"at most {optimizer.lr:g} (--lr)",
            fix=f"lower --min-lr to {optimizer.lr:g} or less",
        )


@rule("tis-bounds", THEME, option="--tis-clip-low")
def tis_bounds(algorithm: AlgorithmSection) -> Found:
    """`--tis-clip-low` must not be above `--tis-clip`."""
    if algorithm.use_tis and algorithm.tis_clip_low > algorithm.tis_clip:
        yield Finding(
            "--tis-clip-low is above --tis-clip",
            got=f"{algorithm.tis_clip_low:g}",
            expected=f"at most {algorithm.tis_clip:g}",
            fix="swap the two",
        )


@rule("tis-no-effect", THEME, option="--use-tis", severity="warning")
def tis_no_effect(algorithm: AlgorithmSection) -> Found:
    """A warning: where the old log-probabilities are the sampler's own, every importance weight of TIS is 1."""
    if algorithm.use_tis and algorithm.use_rollout_logprobs:
        yield Finding(
            "every TIS weight will be 1: --use-rollout-logprobs makes both log-probabilities the same",
            fix="drop --use-tis, or --use-rollout-logprobs where the estimator allows it",
        )


@rule("kl-loss-without-coef", THEME, option="--kl-loss-coef", severity="warning")
def kl_loss_without_coef(algorithm: AlgorithmSection) -> Found:
    """`--use-kl-loss` without a coefficient adds a term of weight 0."""
    if algorithm.use_kl_loss and algorithm.kl_loss_coef == 0:
        yield Finding(
            "the KL loss is computed, and a reference model deployed, but its weight is 0",
            got=str(algorithm.kl_loss_coef),
            expected="above 0",
            fix="add --kl-loss-coef 0.001, or drop --use-kl-loss",
        )


@rule("kl-loss-k1", THEME, option="--kl-loss-type", severity="warning")
def kl_loss_k1(algorithm: AlgorithmSection) -> Found:
    """`--use-kl-loss` with `--kl-loss-type k1` (the default). Its value is the KL divergence, yet its gradient is that
    of `logp`, whose mean over the policy's own samples is zero: noise without a pull towards the reference model. Use
    `k2` or `low_var_kl`. In the reward (`--kl-coef`) k1 is right."""
    if algorithm.use_kl_loss and algorithm.kl_loss_coef and algorithm.kl_loss_type == "k1":
        yield Finding(
            "the gradient of a k1 loss has mean zero on the policy's own samples: it adds noise, and no pull "
            "towards the reference model",
            got="k1",
            expected="k2, k3 or low_var_kl",
            fix="--kl-loss-type k2, or low_var_kl (k1 is right in the reward: --kl-coef)",
        )
