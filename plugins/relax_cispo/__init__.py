"""CISPO: the importance weight is clipped, so no token loses its gradient; the formula is in `loss.py`."""

from __future__ import annotations

from pydantic import Field

from relax_cli import ClipRange, Estimator, GroupOptions, hookimpl, lazy_attributes
from relax_cli.plugin.rules import relax_check_config as relax_check_config

__getattr__ = lazy_attributes(__name__, policy_loss="relax_cispo.loss:policy_loss")


class CispoOptions(ClipRange, GroupOptions):
    """Clip range of the importance weight, and group baselines."""

    cispo_by_sign: bool = Field(
        False, description="bound the CISPO weight above for positive and below for negative advantages only"
    )
    cispo_two_sided: bool = Field(
        False, description="the default: clip the CISPO weight on both sides, as in the paper; undoes --cispo-by-sign"
    )


@hookimpl
def relax_estimators() -> list[Estimator]:
    return [
        Estimator(
            name="cispo",
            summary="clipped importance weights on the log-probability, group-relative advantages",
            paper="arXiv:2506.13585",
            options=CispoOptions,
            advantages="relax_cli.algorithms.groups:advantages",
            policy_loss="relax_cispo.loss:policy_loss",
            needs_groups=True,
            loss_aggregation="token-mean",
        )
    ]
