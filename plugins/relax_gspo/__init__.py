"""GSPO: one importance ratio per sequence. Paper: arXiv:2507.18071.

The formula is in `loss.py`.
"""

from __future__ import annotations

from relax_cli import ClipOptions, Config, Estimator, GroupOptions, Problem, hookimpl, lazy_attributes
from relax_cli.plugin.rules import check_group_size

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


@hookimpl
def relax_check_config(config: Config) -> list[Problem]:
    return check_group_size(config)
