"""What a PPO run must satisfy, and the options only one value makes sense for."""

from __future__ import annotations

import json
from typing import Any

from relax_cli import Change, Config, Normalized, Problem

_RECIPE_HINT = "or start from a PPO recipe (`relax recipes list`)"


def check_config(config: Config) -> list[Problem]:
    """All findings at once; each id is a stable rule name."""
    return [*_check_roles(config), *_check_schedule(config)]


def _check_roles(config: Config) -> list[Problem]:
    resource = config.parallel.resource
    # A missing critic is best shaped like the actor, so that both can share a placement.
    missing = {"critic": resource.get("actor", (1, 1)), "advantages": (1, 0)}
    why = {
        "critic": "PPO learns a value function, and no critic is deployed",
        "advantages": "PPO computes advantages in a service of its own (on the CPU: [1, 0]); it is missing",
    }
    complete = json.dumps({**missing, **resource})
    return [
        Problem(
            id=f"ppo-needs-{role}",
            message=why[role],
            option="--resource",
            got=json.dumps(resource),
            expected=f'an entry "{role}"',
            fix=f"--resource '{complete}'",
        )
        for role in missing
        if role not in resource
    ]


def _check_schedule(config: Config) -> list[Problem]:
    problems = []
    if not config.parallel.colocate:
        problems.append(
            Problem(
                id="ppo-needs-colocate",
                message="PPO runs its roles in turns on the same devices (synchronous colocate)",
                option="--colocate",
                got="off",
                expected="on",
                fix=f"--colocate, {_RECIPE_HINT}",
            )
        )
    if config.parallel.fully_async:
        problems.append(
            Problem(
                id="ppo-no-fully-async",
                message="PPO is synchronous: values and advantages belong to the policy that sampled",
                option="--fully-async",
                got="on",
                expected="off",
                fix=f"remove --fully-async and use --colocate, {_RECIPE_HINT}",
            )
        )
    if not config.algorithm.use_rollout_logprobs:
        problems.append(
            Problem(
                id="ppo-needs-rollout-logprobs",
                message="no service is deployed that would recompute the old log-probabilities",
                option="--use-rollout-logprobs",
                got="off",
                expected="on",
                fix="--use-rollout-logprobs",
            )
        )
    return problems


def normalize_config(config: Config) -> Normalized:
    """Switch the KL terms off (one warning) and offloading of sleeping trainers on."""
    algorithm, parallel = config.algorithm, config.parallel
    no_reference = "PPO deploys no reference model"
    changes = []
    if algorithm.use_kl_loss:
        changes.append(Change("--use-kl-loss", True, False, no_reference))
    if algorithm.kl_coef != 0:
        changes.append(Change("--kl-coef", algorithm.kl_coef, 0.0, no_reference))
    warnings = (_kl_off(changes),) if changes else ()
    if not parallel.offload_train:
        changes.append(Change("--offload-train", False, True, "actor and critic take turns on the same devices"))
    update: dict[str, Any] = {
        "algorithm": algorithm.model_copy(update={"use_kl_loss": False, "kl_coef": 0.0}),
        "parallel": parallel.model_copy(update={"offload_train": True}),
    }
    return Normalized(config.model_copy(update=update), tuple(changes), warnings)


def _kl_off(changes: list[Change]) -> Problem:
    return Problem(
        id="ppo-kl-off",
        message="PPO runs without KL terms: they are switched off, and no reference model is needed",
        option=changes[0].option,
        got=", ".join(f"{change.option} {change.before}" for change in changes),
        expected="no KL options",
        fix=f"remove {' and '.join(change.option for change in changes)}",
        severity="warning",
    )
