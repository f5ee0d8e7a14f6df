"""GSPO: one importance ratio per sequence; the formula is in `loss.py`."""

from __future__ import annotations

from relax_cli import ClipOptions, Estimator, GroupOptions, hookimpl, lazy_attributes
from relax_cli.plugin.rules import relax_check_config as relax_check_config

__getattr__ = lazy_attributes(__name__, policy_loss="relax_gspo.loss:policy_loss")


class GspoOptions(ClipOptions, GroupOptions):
    """PPO-Clip on the sequence ratio, and group baselines."""


@hookimpl
def relax_estimators() -> list[Estimator]:
    return [
        Estimator(
            name="gspo",
            summary="sequence-level importance ratio, group-relative advantages",
            paper="arXiv:2507.18071",
            options=GspoOptions,
            advantages="relax_cli.algorithms.groups:advantages",
            policy_loss="relax_gspo.loss:policy_loss",
            needs_groups=True,
        )
    ]
