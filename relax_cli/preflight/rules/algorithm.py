"""Rules about what is optimised: coefficients and bounds that make no sense together. See `checks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from relax_cli.config.schema import Config
from relax_cli.errors import Problem

if TYPE_CHECKING:
    from relax_cli.preflight.rules.files import Found


def learning_rates(config: Config) -> Found:
    """A decay ends below where it starts."""
    section = config.optimizer
    if section.lr_decay_style == "constant" or section.min_lr <= section.lr:
        return None
    return Problem(
        id="min-lr-above-lr",
        message="the learning rate would rise, not decay",
        fix=f"lower --min-lr to {section.lr:g} or less",
        option="--min-lr",
        got=f"{section.min_lr:g}",
        expected=f"at most {section.lr:g} (--lr)",
    )


def tis_bounds(config: Config) -> Found:
    """The bounds of truncated importance sampling are in order."""
    section = config.algorithm
    if not section.use_tis or section.tis_clip_low <= section.tis_clip:
        return None
    return Problem(
        id="tis-bounds",
        message="--tis-clip-low is above --tis-clip",
        fix="swap the two",
        option="--tis-clip-low",
        got=f"{section.tis_clip_low:g}",
        expected=f"at most {section.tis_clip:g}",
    )


def tis_effect(config: Config) -> Found:
    """Truncated importance sampling compares the engine's log-probabilities with recomputed ones."""
    section = config.algorithm
    if not (section.use_tis and section.use_rollout_logprobs):
        return None
    return Problem(
        id="tis-no-effect",
        message="every TIS weight will be 1: --use-rollout-logprobs makes both log-probabilities the same",
        fix="drop --use-tis, or --use-rollout-logprobs where the estimator allows it",
        option="--use-tis",
        severity="warning",
    )


def kl_loss_coef(config: Config) -> Found:
    """A KL loss has a weight."""
    section = config.algorithm
    if not section.use_kl_loss or section.kl_loss_coef > 0:
        return None
    return Problem(
        id="kl-loss-without-coef",
        message="the KL loss is computed, and a reference model deployed, but its weight is 0",
        fix="add --kl-loss-coef 0.001, or drop --use-kl-loss",
        option="--kl-loss-coef",
        got=str(section.kl_loss_coef),
        expected="above 0",
        severity="warning",
    )


def kl_loss_type(config: Config) -> Found:
    """The KL loss pulls towards the reference; k1 does so in its value only, not in its gradient."""
    section = config.algorithm
    if not section.use_kl_loss or section.kl_loss_coef == 0 or section.kl_loss_type != "k1":
        return None
    return Problem(
        id="kl-loss-k1",
        message="the gradient of a k1 loss has mean zero on the policy's own samples: it adds noise, and no pull "
        "towards the reference model",
        fix="--kl-loss-type k2, or low_var_kl (k1 is right in the reward: --kl-coef)",
        option="--kl-loss-type",
        got="k1",
        expected="k2, k3 or low_var_kl",
        severity="warning",
    )


ALGORITHM_RULES: tuple[Callable[[Config], Found], ...] = (
    learning_rates,
    tis_bounds,
    tis_effect,
    kl_loss_coef,
    kl_loss_type,
)
