"""Which roles take part in a step and which queue fields they exchange. Plugins return a changed copy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from relax_cli.config.schema import Config
from relax_cli.errors import ConfigError, Problem, problem_kind

SAMPLE_FIELDS = (
    "tokens",
    "prompt_lens",
    "response_lens",
    "response_mask",
    "rollout_log_probs",
    "rewards",
    "group_ids",
    "truncated",
)
"""What the rollout role writes for every sample."""
TOKEN_REWARDS = "token_rewards"
"""What it also writes for every episode: several rewards have several places."""
WEIGHT_VERSIONS = "weight_versions"
"""What it also writes with `--partial-rollout`: the weights that sampled each token."""
ROUTES = "routed_experts"
"""What it also writes with `--router-replay`: the experts that each token was generated with."""

SERVICE_GRAPH = problem_kind(
    "service-graph",
    "Plugins",
    "A role reads a field that no earlier role writes, two roles write one field, or a role is unknown or added twice.",
)


@dataclass(frozen=True)
class RoleSpec:
    """One role and the queue fields it reads and writes."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    uses_device: bool
    """False: runs on the CPU and shares no device memory."""
    summary: str = ""
    """One line for people."""


@dataclass(frozen=True)
class ServiceGraph:
    """Roles in the order of a step."""

    roles: tuple[RoleSpec, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Role names in the order of a step."""
        return tuple(role.name for role in self.roles)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> RoleSpec:
        """The role of that name. Raises ConfigError: there is none."""
        return self.roles[self._index(name)]

    def with_role(self, spec: RoleSpec, before: str = "actor") -> ServiceGraph:
        """A graph with one more role, in front of `before`.
        Raises ConfigError: the name is taken, or there is no role `before`."""
        if spec.name in self.names:
            raise ConfigError(SERVICE_GRAPH(f"the service graph already has a role {spec.name!r}", fix="use replace()"))
        at = self._index(before)
        return ServiceGraph((*self.roles[:at], spec, *self.roles[at:]))

    def replace(
        self,
        name: str,
        *,
        reads: tuple[str, ...] | None = None,
        writes: tuple[str, ...] | None = None,
        uses_device: bool | None = None,
    ) -> ServiceGraph:
        """A graph in which the role `name` has other properties; None keeps one.
        Raises ConfigError: there is no such role."""
        at = self._index(name)
        changes: dict[str, Any] = {"reads": reads, "writes": writes, "uses_device": uses_device}
        new = replace(self.roles[at], **{field: value for field, value in changes.items() if value is not None})
        return ServiceGraph((*self.roles[:at], new, *self.roles[at + 1 :]))

    def problems(self) -> list[Problem]:
        """Fields that a role reads though no earlier role writes them, and fields that two roles write."""
        found = []
        writer: dict[str, str] = {}
        for role in self.roles:
            for field in (field for field in role.reads if field not in writer):
                message = f"role {role.name!r} reads {field!r}, which no earlier role writes"
                found.append(SERVICE_GRAPH(message, fix=f"add {field!r} to the writes of a role before {role.name!r}"))
            for field in role.writes:
                if field in writer:
                    message = f"roles {writer[field]!r} and {role.name!r} both write {field!r}"
                    found.append(SERVICE_GRAPH(message, fix="let one of them write another field"))
                writer.setdefault(field, role.name)
        return found

    def _index(self, name: str) -> int:
        if name not in self.names:
            message = f"the service graph has no role {name!r}"
            raise ConfigError(SERVICE_GRAPH(message, fix=f"use one of {', '.join(self.names)}"))
        return self.names.index(name)


def base_graph() -> ServiceGraph:
    """Rollout and actor: all that an estimator without a critic needs."""
    rollout = RoleSpec("rollout", (), SAMPLE_FIELDS, uses_device=True, summary="generates and judges samples")
    actor = RoleSpec("actor", SAMPLE_FIELDS, (), uses_device=True, summary="trains the policy")
    return ServiceGraph((rollout, actor))


REFERENCE = RoleSpec(
    "reference",
    reads=("tokens", "prompt_lens", "response_lens", "response_mask"),
    writes=("ref_log_probs",),
    uses_device=True,
    summary="a frozen policy that KL terms compare with",
)


def completed(graph: ServiceGraph, config: Config) -> ServiceGraph:
    """A graph with what no estimator has to care about: fields of other options, the reference model of KL terms, and
    advantages where no role makes them."""
    algorithm = config.algorithm
    for name, is_written in {WEIGHT_VERSIONS: config.carries_over, ROUTES: config.parallel.router_replay}.items():
        if is_written:
            graph = graph.replace("rollout", writes=(*graph["rollout"].writes, name))
            graph = graph.replace("actor", reads=(*graph["actor"].reads, name))
    if config.episode.env is not None:
        graph = graph.replace("rollout", writes=(*graph["rollout"].writes, TOKEN_REWARDS))
        for reader in graph.roles:
            if "rewards" in reader.reads:
                graph = graph.replace(reader.name, reads=(*reader.reads, TOKEN_REWARDS))
    if algorithm.needs_reference:
        graph = graph.with_role(REFERENCE, before=graph.names[graph.names.index("rollout") + 1])
        for role in ("critic", "advantages") if algorithm.kl_coef else ():
            if role in graph:
                extra = [f for f in ("rollout_log_probs", "ref_log_probs") if f not in graph[role].reads]
                graph = graph.replace(role, reads=(*graph[role].reads, *extra))
        graph = graph.replace("actor", reads=(*graph["actor"].reads, "ref_log_probs"))
    if not any("advantages" in role.writes for role in graph.roles):
        graph = graph.replace("actor", writes=(*graph["actor"].writes, "advantages"))
    return graph
