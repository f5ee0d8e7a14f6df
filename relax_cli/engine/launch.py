"""Launches the roles as Ray actors that share one placement group. Only this file knows Ray.

Rank i of actor, critic and rollout sits in bundle i; the CPU-only Advantages service takes no bundle. Weights go from
the actor to the rollout workers through Ray's object store by reference: this process never holds a tensor.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from relax_cli.config.placement import QUEUE_CPUS, needed_cpus, ranks_of, shared_bundles
from relax_cli.engine.build import RoleBuilder, WorkerSpec, cpu_environment, worker_specs
from relax_cli.engine.local import free_port
from relax_cli.engine.plan import LaunchPlan
from relax_cli.engine.session import RoleGroup, Roles, Session
from relax_cli.errors import EnvironmentFault, Problem, RelaxError, RunError

if TYPE_CHECKING:
    from torch import Tensor

SHARE = 0.25
"""Part of a bundle's CPU, and of its GPU, that each of the roles taking turns in it asks Ray for."""


def launch_colocated(plan: LaunchPlan) -> Session:
    """Start Ray, TransferQueue and all role workers; returns once every worker is built and asleep."""
    return RaySession(plan)


class RoleWorker:
    """Runs one rank of a role inside a Ray actor; its output goes to `logs/<role>-<rank>.log` of the run."""

    def __init__(self, spec: WorkerSpec) -> None:
        log = os.open(spec.run_dir / "logs" / f"{spec.role}-{spec.rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log, stream.fileno())
        self.spec = spec
        self.role: Any = None

    def meeting_point(self) -> tuple[str, int]:
        """Address and port where the ranks of this role find each other."""
        return ray.util.get_node_ip_address(), free_port()

    def open_queue(self) -> None:
        """Start TransferQueue, owned by this worker."""
        from relax_cli.engine.transfer import open_transfer_queue

        open_transfer_queue()

    def prepare(self) -> None:
        """Import what the role needs while other things start."""
        import torch  # noqa: F401

        if self.spec.role in ("actor", "critic", "reference"):
            from relax_cli.backends.megatron import trainer  # noqa: F401

    def build(self, addr: str, port: int) -> None:
        """Build the role."""
        from relax_cli.engine.transfer import TransferQueueStore

        builder = RoleBuilder(self.spec.at(addr, port))
        queue = TransferQueueStore(builder.graph, builder.config.run.queue_timeout)
        self.role = builder.build(queue)

    def run(self, method: str, *args: Any) -> Any:
        """Call a method of the role."""
        return getattr(self.role, method)(*args)

    def export_weights(self) -> list[ray.ObjectRef]:
        """The actor's weights in the object store; empty on ranks that hold no full copy."""
        named = self.role.export_weights()
        return [] if named is None else [ray.put(as_arrays(named))]

    def load_weights(self, refs: list[ray.ObjectRef], version: int) -> None:
        """Read exported weights from the object store into the rollout engine."""
        self.role.load_weights(as_tensors(ray.get(refs[0])), version)


def as_arrays(named: Mapping[str, Tensor]) -> dict[str, tuple[str, Any]]:
    """Name to type name and bytes of each tensor: Ray copies arrays once and shares them, where it pickles tensors."""
    import torch

    return {
        name: (str(tensor.dtype).removeprefix("torch."), tensor.contiguous().view(torch.uint8).numpy())
        for name, tensor in named.items()
    }


def as_tensors(arrays: Mapping[str, tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors again, over the same memory, which is read-only: they are to be copied from."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name, (dtype, array) in arrays.items():
            yield name, torch.from_numpy(array).view(getattr(torch, dtype))


class RayRole(RoleGroup):
    """The ranks of a role as Ray actors."""

    def __init__(self, name: str, workers: list[Any], run_dir: Path) -> None:
        super().__init__(name, ranks=len(workers))
        self.workers = workers
        self.run_dir = run_dir

    def start(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """See `RoleGroup.start`."""
        refs = [worker.run.remote(method, *args) for worker in self.workers]
        return lambda: self.collect(refs, method)

    def run_on(self, rank: int, method: str, *args: Any) -> Any:
        """See `RoleGroup.run_on`."""
        return self.collect([self.workers[rank].run.remote(method, *args)], method)[0]

    def collect(self, refs: list[Any], doing: str) -> list[Any]:
        """Results of all ranks, as soon as all have one or any has failed.

        Raises:
            RelaxError: what the role raised, or a `RunError` naming role, rank and log file.
        """
        waiting = dict(zip(refs, range(len(refs)), strict=True))
        results: dict[int, Any] = {}
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1)
            rank = waiting.pop(done[0])
            try:
                results[rank] = ray.get(done[0])
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, RelaxError):
                    raise error.cause from None
                raise self._failed(rank, doing, repr(error.cause)) from error
            except ray.exceptions.RayActorError as error:
                raise self._failed(rank, doing, "the worker process died") from error
        return [results[rank] for rank in range(len(refs))]

    def _failed(self, rank: int, doing: str, reason: str) -> RunError:
        log = self.run_dir / "logs" / f"{self.name}-{rank}.log"
        return RunError(
            Problem(
                id="worker-failed",
                message=f"rank {rank} of {self.name} failed in `{doing}`",
                where=str(log),
                got=reason.splitlines()[0][:300],
                expected="the call to return",
                fix=f"tail -n 40 {log}",
            )
        )


class RaySession(Session):
    """Owns Ray (unless it was there before), TransferQueue and the workers."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.owns_ray = not ray.is_initialized()
        self.group: PlacementGroup | None = None
        self.built: dict[str, RayRole] = {}
        try:
            self._start(plan)
        except BaseException:
            self.close()
            raise

    def _start(self, plan: LaunchPlan) -> None:
        plan.status("starting Ray")
        if self.owns_ray:
            start_ray(plan)
        check_cpus(plan)
        plan.status("starting the workers")
        (plan.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        gpu = plan.config.parallel.device == "cuda"
        bundle = {"CPU": 1, "GPU": 1} if gpu else {"CPU": 1}
        self.group = placement_group([bundle] * shared_bundles(plan.config.parallel), strategy="PACK")
        ray.get(self.group.ready())
        for role in plan.graph.roles:
            specs = worker_specs(plan, role.name)
            workers = [self._worker(spec, role.uses_device, gpu) for spec in specs]
            self.built[role.name] = RayRole(role.name, workers, plan.run_dir)
        importing = {name: [w.prepare.remote() for w in role.workers] for name, role in self.built.items()}
        plan.status("starting TransferQueue")
        rollout = self.built["rollout"]
        rollout.collect([rollout.workers[0].open_queue.remote()], "open_queue")
        plan.status("loading the models")
        for name, refs in importing.items():
            self.built[name].collect(refs, "prepare")
        building = {}
        for name, group in self.built.items():
            addr, port = ray.get(group.workers[0].meeting_point.remote())
            building[name] = [worker.build.remote(addr, port) for worker in group.workers]
        for name, refs in building.items():
            self.built[name].collect(refs, "build")
        self.roles = Roles(**self.built)

    def _worker(self, spec: WorkerSpec, uses_device: bool, gpu: bool) -> Any:
        options: dict[str, Any] = {"num_cpus": SHARE, "runtime_env": {"env_vars": cpu_environment(spec.threads)}}
        if uses_device:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=spec.rank
            )
            if gpu:
                options["num_gpus"] = SHARE
        return ray.remote(RoleWorker).options(**options).remote(spec)

    def publish_weights(self, version: int) -> None:
        """See `Session.publish_weights`; the references travel inside lists, so that nothing resolves them here."""
        actor, rollout = self.built["actor"], self.built["rollout"]
        with actor.awake():
            exported = actor.collect([w.export_weights.remote() for w in actor.workers], "export_weights")
        (refs,) = [refs for refs in exported if refs]
        with rollout.awake():
            rollout.collect([w.load_weights.remote(refs, version) for w in rollout.workers], "load_weights")

    def close(self) -> None:
        """See `Session.close`."""
        if self.owns_ray:
            ray.shutdown()
            return
        for role in self.built.values():
            for worker in role.workers:
                ray.kill(worker)
        if self.group is not None:
            ray.util.remove_placement_group(self.group)


def start_ray(plan: LaunchPlan) -> None:
    """A Ray of our own on this machine, or the cluster that RAY_ADDRESS names.

    A local one gets as many logical CPUs as the run needs, however many cores there are: roles take turns, and
    TransferQueue waits for ever for a CPU it cannot get.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # ray.init puts an aborting SIGTERM handler in the place of ours.
    on_sigterm = signal.getsignal(signal.SIGTERM)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    address = os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, **quiet)
    else:
        weights = sum(f.stat().st_size for f in plan.model_folder.glob("*.safetensors"))
        ray.init(
            address="local",
            num_cpus=plan.config.parallel.ray_num_cpus or needed_cpus(plan.config.parallel),
            include_dashboard=False,
            object_store_memory=max(256 << 20, 6 * weights),
            **quiet,
        )
    signal.signal(signal.SIGTERM, on_sigterm)


def check_cpus(plan: LaunchPlan) -> None:
    """Refuse before anything waits for CPUs that will never be free.

    Raises:
        EnvironmentFault: the cluster has fewer free logical CPUs than the run needs.
    """
    free, needed = ray.available_resources().get("CPU", 0.0), needed_cpus(plan.config.parallel)
    if free < needed:
        roles = ", ".join(f"{role.name} {ranks_of(plan.config.parallel, role.name)}" for role in plan.graph.roles)
        raise EnvironmentFault(
            Problem(
                id="ray-cpus",
                message="Ray has too few free logical CPUs for the roles and TransferQueue",
                where="the Ray cluster",
                got=f"{free:g} free",
                expected=f"at least {needed} ({roles}, TransferQueue {QUEUE_CPUS})",
                option="--resource",
                fix=f"use fewer workers in --resource, or start Ray with more: ray start --head --num-cpus {needed}",
            )
        )
