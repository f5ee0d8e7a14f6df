"""`--launcher local`: the same roles and the same step inside this process, for a debugger."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from relax_cli.engine.build import RoleBuilder, cpu_environment, worker_specs
from relax_cli.engine.session import RoleGroup, Roles, Session
from relax_cli.plugin.launch_plan import LaunchPlan


class LocalRole(RoleGroup):
    """A role with one rank, called directly."""

    def __init__(self, name: str, role: Any) -> None:
        super().__init__(name, ranks=1)
        self.role = role

    def start(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """See `RoleGroup.start`; everything is done before this returns."""
        results = [self.run_on(0, method, *args)]
        return lambda: results

    def run_on(self, rank: int, method: str, *args: Any) -> Any:
        """See `RoleGroup.run_on`."""
        assert rank == 0
        return getattr(self.role, method)(*args)


class LocalSession(Session):
    """All roles in this process, the queue a dictionary."""

    def __init__(self, plan: LaunchPlan) -> None:
        from relax_cli.engine.transfer import LocalQueue

        queue = LocalQueue(plan.graph)
        port = free_port()
        built: dict[str, LocalRole] = {}
        for name in plan.graph.names:
            plan.status(f"building {name}")
            (spec,) = worker_specs(plan, name)
            os.environ.update(cpu_environment(spec.threads))
            built[name] = LocalRole(name, RoleBuilder(spec.at("127.0.0.1", port)).build(queue))
        self.roles = Roles(**built)

    def copy_weights(self, version: int) -> None:
        """See `Session.copy_weights`."""
        with self.roles.actor.awake():
            named = self.roles.actor.run_on(0, "export_weights")
        with self.roles.rollout.awake():
            self.roles.rollout.run("load_weights", named.items(), version)

    def close(self) -> None:
        """See `Session.close`."""
        from relax_cli.backends.megatron import parallel

        self.roles.rollout.run("close")
        parallel.shutdown()


def free_port() -> int:
    """A TCP port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
