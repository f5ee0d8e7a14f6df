"""Rules that several estimators share."""

from __future__ import annotations

from relax_cli.config.schema import Config
from relax_cli.errors import Problem


def check_group_size(config: Config) -> list[Problem]:
    """A group baseline needs at least two samples of the same prompt (rule `group-size`)."""
    size = config.batch.n_samples_per_prompt
    if size >= 2:
        return []
    return [
        Problem(
            id="group-size",
            message=f"{config.algorithm.advantage_estimator} compares samples of one prompt with each other",
            option="--n-samples-per-prompt",
            got=str(size),
            expected="2 or more",
            fix="--n-samples-per-prompt 8",
        )
    ]
