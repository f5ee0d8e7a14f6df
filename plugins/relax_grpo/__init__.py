"""GRPO: the loss of PPO (`relax_ppo/loss.py`) with the advantages of `relax_cli/algorithms/groups.py`."""

from __future__ import annotations

from relax_cli import ClipOptions, Estimator, GroupOptions, hookimpl, lazy_attributes
from relax_cli.plugin.rules import relax_check_config as relax_check_config

__getattr__ = lazy_attributes(__name__, policy_loss="relax_ppo.loss:policy_loss")


class GrpoOptions(ClipOptions, GroupOptions):
    """PPO-Clip and group baselines."""


@hookimpl
def relax_estimators() -> list[Estimator]:
    return [
        Estimator(
            name="grpo",
            summary="PPO-Clip with group-relative advantages, no critic",
            paper="arXiv:2402.03300",
            options=GrpoOptions,
            advantages="relax_cli.algorithms.groups:advantages",
            policy_loss="relax_ppo.loss:policy_loss",
            needs_groups=True,
        )
    ]
