"""Rules that several estimators share."""

from __future__ import annotations

from relax_cli.config.schema import Config
from relax_cli.errors import Problem, problem_kind
from relax_cli.plugin.hookspecs import hookimpl

GROUP_SIZE = problem_kind(
    "group-size",
    "Objective",
    "Estimators with group baselines compare samples of one prompt, so they need two or more of each.",
    option="--n-samples-per-prompt",
)


def check_group_size(config: Config) -> list[Problem]:
    """A group baseline needs at least two samples of the same prompt."""
    size = config.batch.n_samples_per_prompt
    if size >= 2:
        return []
    message = f"{config.algorithm.advantage_estimator} compares samples of one prompt with each other"
    return [GROUP_SIZE(message, got=str(size), expected="2 or more", fix="--n-samples-per-prompt 8")]


@hookimpl
def relax_check_config(config: Config) -> list[Problem]:
    """`check_group_size` as the whole hook, for a plugin to import."""
    return check_group_size(config)
