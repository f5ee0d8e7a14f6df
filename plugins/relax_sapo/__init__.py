"""SAPO: a sigmoid gate in place of clipping; the formula is in `loss.py`."""

from __future__ import annotations

from pydantic import Field

from relax_cli import Estimator, GroupOptions, hookimpl, lazy_attributes
from relax_cli.plugin.rules import relax_check_config as relax_check_config

__getattr__ = lazy_attributes(__name__, policy_loss="relax_sapo.loss:policy_loss")


class SapoOptions(GroupOptions):
    """Temperatures of the gate, and group baselines."""

    sapo_tau_pos: float = Field(1.0, gt=0, description="SAPO gate temperature for positive advantages")
    sapo_tau_neg: float = Field(1.05, gt=0, description="SAPO gate temperature for other advantages")


@hookimpl
def relax_estimators() -> list[Estimator]:
    return [
        Estimator(
            name="sapo",
            summary="soft sigmoid gate on the importance ratio, group-relative advantages",
            paper="arXiv:2511.20347",
            options=SapoOptions,
            advantages="relax_cli.algorithms.groups:advantages",
            policy_loss="relax_sapo.loss:policy_loss",
            needs_groups=True,
        )
    ]
