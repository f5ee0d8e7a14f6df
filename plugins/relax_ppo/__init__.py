"""PPO with a separate critic: formula in `loss.py`, advantages in `advantages.py`, rules of a run in `rules.py`."""

from __future__ import annotations

from typing import Any

from relax_cli import (
    ClipOptions,
    Config,
    Estimator,
    GaeOptions,
    LaunchPlan,
    RoleSpec,
    ServiceGraph,
    hookimpl,
    lazy_attributes,
)
from relax_ppo.rules import relax_check_config as relax_check_config
from relax_ppo.rules import relax_normalize_config as relax_normalize_config

__getattr__ = lazy_attributes(__name__, policy_loss="relax_ppo.loss:policy_loss")


class PpoOptions(ClipOptions, GaeOptions):
    """PPO-Clip and GAE."""


CRITIC = RoleSpec(
    "critic",
    reads=("tokens", "prompt_lens", "response_lens", "response_mask", "rewards", "group_ids", "truncated"),
    writes=("values",),
    uses_device=True,
    summary="estimates the value of each state and learns it from the returns",
)
ADVANTAGES = RoleSpec(
    "advantages",
    reads=("response_lens", "response_mask", "rewards", "group_ids", "truncated", "values"),
    writes=("advantages", "returns"),
    uses_device=False,
    summary="turns rewards and values into advantages (GAE)",
)


@hookimpl
def relax_estimators() -> list[Estimator]:
    return [
        Estimator(
            name="ppo",
            summary="PPO-Clip with a separate critic and generalised advantage estimation",
            paper="arXiv:1707.06347",
            options=PpoOptions,
            advantages="relax_ppo.advantages:advantages",
            policy_loss="relax_ppo.loss:policy_loss",
            needs_critic=True,
        )
    ]


@hookimpl
def relax_service_graph(config: Config, graph: ServiceGraph) -> ServiceGraph:
    """rollout → critic → advantages → actor; the actor reads its advantages instead of the rewards."""
    actor_reads = tuple(f for f in graph["actor"].reads if f not in ("rewards", "group_ids", "truncated"))
    graph = graph.with_role(CRITIC).with_role(ADVANTAGES).replace("actor", reads=(*actor_reads, "advantages"))
    if config.algorithm.bootstrap_truncated:
        graph = graph.replace("critic", writes=(*CRITIC.writes, "bootstrap_values"))
        graph = graph.replace("advantages", reads=(*ADVANTAGES.reads, "bootstrap_values"))
    return graph


@hookimpl
def relax_launch(plan: LaunchPlan) -> Any:
    """Start the colocated workers of a PPO run."""
    if plan.config.algorithm.advantage_estimator != "ppo":
        return None
    from relax_cli.engine.ray.launch import RaySession

    return RaySession(plan)
