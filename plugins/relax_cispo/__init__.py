"""CISPO: the importance weight is clipped, so no token loses its gradient. Paper: arXiv:2506.13585.

The formula is in `loss.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from relax_cli import ClipOptions, Config, Estimator, GroupOptions, Problem, hookimpl
from relax_cli.plugin.rules import check_group_size

if TYPE_CHECKING:
    from relax_cispo.loss import policy_loss as policy_loss


class CispoOptions(ClipOptions, GroupOptions):
    """Clip range of the importance weight, and group baselines."""

    cispo_two_sided: bool = Field(
        False, description="clip the CISPO weight on both sides for every token, as in the paper"
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
        )
    ]


@hookimpl
def relax_check_config(config: Config) -> list[Problem]:
    return check_group_size(config)


def __getattr__(name: str) -> Any:
    # The math imports torch, so it is loaded when it is used.
    if name == "policy_loss":
        from relax_cispo.loss import policy_loss

        return policy_loss
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
