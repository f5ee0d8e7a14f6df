"""What a PPO run must satisfy, and the options only one value makes sense for."""

from __future__ import annotations

import json
from typing import Any

from relax_cli import Change, Config, Normalized, Problem, hookimpl, problem_kind

NEEDS_CRITIC = problem_kind(
    "ppo-needs-critic",
    "PPO",
    "PPO learns a value function: `--resource` needs a `critic`, best of the actor's shape.",
    option="--resource",
)
NEEDS_ADVANTAGES = problem_kind(
    "ppo-needs-advantages",
    "PPO",
    'PPO computes advantages in a service of its own; `"advantages": [1, 0]` runs it without a device.',
    option="--resource",
)
NEEDS_COLOCATE = problem_kind(
    "ppo-needs-colocate",
    "PPO",
    "PPO runs its roles in turns on the same devices, so it needs `--colocate`.",
    option="--colocate",
)
NO_FULLY_ASYNC = problem_kind(
    "ppo-no-fully-async",
    "PPO",
    "PPO is synchronous: values and advantages belong to the policy that sampled.",
    option="--fully-async",
)
NEEDS_ROLLOUT_LOGPROBS = problem_kind(
    "ppo-needs-rollout-logprobs",
    "PPO",
    "No service recomputes the old log-probabilities, so they have to be the sampler's (`--use-rollout-logprobs`).",
    option="--use-rollout-logprobs",
)
KL_OFF = problem_kind(
    "ppo-kl-off",
    "PPO",
    "A warning: PPO runs without KL terms, so they are switched off and no reference model is needed.",
    severity="warning",
)


@hookimpl
def relax_check_config(config: Config) -> list[Problem]:
    """All findings together."""
    parallel, resource = config.parallel, config.parallel.resource
    # A missing critic is best shaped like the actor, so that both can share a placement.
    missing = {"critic": resource.get("actor", (1, 1)), "advantages": (1, 0)}
    given, fix = json.dumps(resource), f"--resource '{json.dumps({**missing, **resource})}'"
    recipe_hint = "or start from a PPO recipe (`relax recipes list`)"
    problems = []
    if "critic" not in resource:
        message = "PPO learns a value function, and no critic is deployed"
        problems.append(NEEDS_CRITIC(message, got=given, expected='an entry "critic"', fix=fix))
    if "advantages" not in resource:
        message = "PPO computes advantages in a service of its own (on the CPU: [1, 0]), which is missing"
        problems.append(NEEDS_ADVANTAGES(message, got=given, expected='an entry "advantages"', fix=fix))
    if not parallel.colocate:
        message = "PPO runs its roles in turns on the same devices (synchronous colocate)"
        problems.append(NEEDS_COLOCATE(message, got="off", expected="on", fix=f"--colocate, {recipe_hint}"))
    if parallel.fully_async:
        fix = f"drop --fully-async, {recipe_hint}"
        message = "PPO is synchronous: values and advantages belong to the policy that sampled"
        problems.append(NO_FULLY_ASYNC(message, got="on", expected="off", fix=fix))
    if not config.algorithm.use_rollout_logprobs:
        message = "no service is deployed that would recompute the old log-probabilities"
        problems.append(NEEDS_ROLLOUT_LOGPROBS(message, got="off", expected="on", fix="--use-rollout-logprobs"))
    return problems


@hookimpl
def relax_normalize_config(config: Config) -> Normalized:
    """Switch the KL terms off (one warning) and offloading of sleeping trainers on."""
    algorithm, parallel = config.algorithm, config.parallel
    no_reference = "PPO deploys no reference model"
    changes = []
    if algorithm.use_kl_loss:
        changes.append(Change("--use-kl-loss", True, False, no_reference))
    if algorithm.kl_coef != 0:
        changes.append(Change("--kl-coef", algorithm.kl_coef, 0.0, no_reference))
    warnings: tuple[Problem, ...] = ()
    if changes:
        message = "PPO runs without KL terms: they are switched off, and no reference model is needed"
        got = ", ".join(f"{change.option} {json.dumps(change.before)}" for change in changes)
        fix = f"drop {' and '.join(change.option for change in changes)}"
        warnings = (KL_OFF(message, option=changes[0].option, got=got, expected="no KL options", fix=fix),)
    if not parallel.offload_train:
        changes.append(Change("--offload-train", False, True, "actor and critic take turns on the same devices"))
    update: dict[str, Any] = {
        "algorithm": algorithm.model_copy(update={"use_kl_loss": False, "kl_coef": 0.0}),
        "parallel": parallel.model_copy(update={"offload_train": True}),
    }
    return Normalized(config.model_copy(update=update), tuple(changes), warnings)
