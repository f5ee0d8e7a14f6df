"""GRPO: PPO-Clip with advantages relative to the prompt's other samples. Paper: arXiv:2402.03300.

The formula is in `loss.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_cli import ClipOptions, Config, Estimator, GroupOptions, Problem, hookimpl
from relax_cli.plugin.rules import check_group_size

if TYPE_CHECKING:
    from relax_grpo.loss import policy_loss as policy_loss


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
            policy_loss="relax_grpo.loss:policy_loss",
            needs_groups=True,
        )
    ]


@hookimpl
def relax_check_config(config: Config) -> list[Problem]:
    return check_group_size(config)


def __getattr__(name: str) -> Any:
    # The math imports torch, so it is loaded when it is used.
    if name == "policy_loss":
        from relax_grpo.loss import policy_loss

        return policy_loss
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
