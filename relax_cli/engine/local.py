"""`--launcher local`: the same roles and the same step inside this process, for a debugger."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from relax_cli.backends.ports import free_port
from relax_cli.engine.build import RoleBuilder, cpu_environment, worker_specs
from relax_cli.engine.imports import LOCAL, import_quickly
from relax_cli.engine.session import Ranks, Result, Role, Roles, Session
from relax_cli.plugin.launch_plan import LaunchPlan


class LocalRanks(Ranks[Role]):
    """A role with one rank, called directly."""

    def __init__(self, name: str, role: Role) -> None:
        super().__init__(name)
        self.role = role

    def start(self, request: Callable[[Role], Result]) -> Callable[[], list[Result]]:
        """Everything is done when it is waited for."""
        return lambda: [self.on(0, request)]

    def tell(self, request: Callable[[Role], object]) -> None:
        with contextlib.suppress(Exception):
            request(self.role)

    def on(self, rank: int, request: Callable[[Role], Result]) -> Result:
        assert rank == 0
        return request(self.role)


class LocalSession(Session):
    """All roles in this process, the queue a dictionary."""

    def __init__(self, plan: LaunchPlan) -> None:
        # Before torch is imported: OpenMP reads it once, and its waiting threads would otherwise spin.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        import_quickly(LOCAL)
        from relax_cli.engine.transfer import LocalQueue

        queue = LocalQueue(plan.graph)
        port = free_port()
        built: dict[str, LocalRanks[Any]] = {}
        for name in plan.graph.names:
            plan.status(f"building {name}")
            (spec,) = worker_specs(plan, name)
            os.environ.update(cpu_environment(spec.threads))
            built[name] = LocalRanks(name, RoleBuilder(replace(spec, master_port=port)).build(queue))
        self.roles = Roles.of(built)

    def copy_weights(self, version: int) -> None:
        with self.roles.actor.awake():
            named = self.roles.actor.ranks.on(0, lambda actor: actor.export_weights())
        assert named is not None, "the first rank has all weights"
        with self.roles.rollout.awake():
            self.roles.rollout.ranks.all(lambda rollout: rollout.load_weights(named.items(), version))

    def close(self) -> None:
        from relax_cli.backends.megatron import parallel

        self.roles.rollout.ranks.all(lambda rollout: rollout.close())
        parallel.shutdown()
