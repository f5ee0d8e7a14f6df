"""Launches the roles as Ray actors that share one placement group.

Rank i of actor, critic and rollout sits in the i-th bundle; an SGLang server has the bundles of as many ranks as it has
GPUs, and its worker is in the first. The CPU-only Advantages service and workers of external servers take no bundle.
Weights go from the actor to embedded engines through Ray's object store by reference, and to servers from the actor
itself: this process never has a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from relax_cli.backends.rollout.targets import this_node
from relax_cli.config.placement import SERVICE_CPUS, rollout_engine, shared_bundles, takes_bundles
from relax_cli.engine.build import WorkerSpec, cpu_environment, worker_specs
from relax_cli.engine.ray.guardian import Guardian
from relax_cli.engine.ray.queue_keys import QueueKeys
from relax_cli.engine.ray.ranks import RayRanks, RoleWorker, disregard
from relax_cli.engine.ray.start import check_resources, start_failed, start_ray
from relax_cli.engine.ray.watch import ProcessWatch, Whereabouts, children_named
from relax_cli.engine.session import Roles, Session
from relax_cli.errors import EnvironmentFault, problem_kind
from relax_cli.plugin.launch_plan import LaunchPlan
from relax_cli.roles.run_folder import run_folder_errors

SERVER_SPANS_NODES = problem_kind(
    "server-spans-nodes",
    "SGLang servers",
    "The GPUs of one SGLang server would be on several machines.",
    option="--rollout-num-gpus-per-engine",
)
WAITING_FOR_BUNDLES = 5.0
"""Seconds after which the screen says that others use what the roles need."""

SHARE = 0.25
"""Part of a bundle's CPU, and of its GPU, that each of the roles taking turns in it asks Ray for."""


@dataclass(frozen=True)
class Place:
    """One bundle."""

    bundle: int
    """Its number in the placement group."""
    node: str = ""
    """Address of the machine; empty where it is not known."""
    gpu: str = ""
    """What CUDA_VISIBLE_DEVICES calls its GPU on that machine; empty where it has none."""


def in_order(places: Sequence[Place]) -> list[Place]:
    """The bundles as ranks take them: machine by machine, GPUs ascending.

    Ray packs bundles onto few machines, but in any order; a server's GPUs have to be on one.
    """
    largest_first = {node: -sum(place.node == node for place in places) for node in {p.node for p in places}}
    return sorted(places, key=lambda p: (largest_first[p.node], p.node, _number(p.gpu), p.bundle))


def server_places(places: Sequence[Place], gpus_per_server: int, servers: int) -> list[list[Place]]:
    """The bundles of each server, which are those of the ranks with the same numbers, given in the order of ranks.
    Raises EnvironmentFault: a server's GPUs would be on several machines."""
    groups = [list(places[i * gpus_per_server : (i + 1) * gpus_per_server]) for i in range(servers)]
    for number, group in enumerate(groups):
        nodes = sorted({place.node for place in group})
        if len(nodes) > 1:
            raise EnvironmentFault(
                SERVER_SPANS_NODES(
                    f"the GPUs of SGLang server {number} are on {len(nodes)} machines",
                    where=", ".join(nodes),
                    got=", ".join(f"{node}: {sum(p.node == node for p in places)} GPUs" for node in nodes),
                    expected=f"{gpus_per_server} GPUs of one machine for each server",
                    fix="use a --rollout-num-gpus-per-engine that divides the free GPUs of every machine",
                )
            )
    return groups


def _number(gpu: str) -> tuple[int, str]:
    return (int(gpu), "") if gpu.isdigit() else (0, gpu)


class RaySession(Session):
    """Owns Ray (unless it was there before), TransferQueue and the workers."""

    def __init__(self, plan: LaunchPlan) -> None:
        """Start Ray, TransferQueue and all role workers; returns once every worker is built and asleep."""
        self.owns_ray = not ray.is_initialized()
        self.queue_keys = QueueKeys.new()
        self.guardian: Guardian | None = None
        self.group: PlacementGroup | None = None
        self.on_gpus = False
        self.places: list[Place] = []
        """Bundles in the order of ranks."""
        self.built: dict[str, RayRanks[Any]] = {}
        self.watch = ProcessWatch(this_node())
        try:
            with run_folder_errors(plan.run_dir):
                self._start(plan)
        except ray.exceptions.RayError as error:
            self.close()
            raise EnvironmentFault(start_failed("local" if self.owns_ray else "auto", error)) from error
        except BaseException:
            self.close()
            raise

    def _start(self, plan: LaunchPlan) -> None:
        plan.status("starting Ray")
        if self.owns_ray:
            self.guardian = Guardian()
            with self.guardian.adopting():
                start_ray(plan)
            node_id = ray.get_runtime_context().get_node_id()
            for name, pid in children_named(psutil.Process(), "gcs_server", "raylet"):
                self.watch.add(f"Ray's {name}", Whereabouts(this_node(), node_id, pid))
        check_resources(plan)
        plan.status("starting the workers")
        (plan.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        self._reserve(plan)
        for name in plan.graph.names:
            workers = [self._worker(plan, spec) for spec in self._placed(plan, name)]
            self.built[name] = RayRanks(name, workers, plan.run_dir, self.watch)
        for ranks in self.built.values():
            ranks.watch_all()
        importing = {name: role.ask("prepare") for name, role in self.built.items()}
        plan.status("starting TransferQueue")
        rollout = self.built["rollout"]
        rollout.collect([rollout.workers[0].open_queue.remote(self.queue_keys)], "open_queue")
        # TransferQueue's processes are on every node that has a rank.
        for role in self.built.values():
            found = role.collect(role.ask("queue_processes"), "queue_processes")
            for place, processes in zip(role.places, found, strict=True):
                for title, pid in processes:
                    queue = title.removeprefix("ray::").partition(".")[0]
                    self.watch.add(f"{queue} (process {pid})", replace(place, pid=pid))
        plan.status("loading the models")
        self._collect(importing, "prepare")
        for names in build_order(list(self.built), in_turns=self.on_gpus):
            # Some roles at the same time; each is asleep when it is built.
            building = {}
            for name in names:
                role = self.built[name]
                ((addr, port),) = role.collect([role.workers[0].meeting_point.remote()], "meeting_point")
                building[name] = role.ask("build", addr, port, self.queue_keys)
            self._collect(building, "build")
        self.roles = Roles.of(self.built)

    def _reserve(self, plan: LaunchPlan) -> None:
        """Take the bundles of the roles with devices, and find out where they are, if that matters."""
        parallel, sglang = plan.config.parallel, plan.config.sglang
        self.on_gpus = parallel.device == "cuda"
        bundle = {"CPU": 1, "GPU": 1} if self.on_gpus else {"CPU": 1}
        count = shared_bundles(parallel, sglang)
        self.group = placement_group([bundle] * count, strategy="PACK")
        ready = self.group.ready()
        while not ray.wait([ready], timeout=WAITING_FOR_BUNDLES)[0]:
            plan.status(f"waiting until the Ray cluster has {count} free {'GPUs' if self.on_gpus else 'CPUs'}")
        self.places = find_places(self.group) if self.on_gpus else [Place(i) for i in range(count)]

    def _placed(self, plan: LaunchPlan, role: str) -> list[WorkerSpec]:
        """The specs of a role's workers; rank i is in the i-th bundle, a server in the bundles of as many ranks."""
        config, specs = plan.config, worker_specs(plan, role)
        if not takes_bundles(role, config.parallel, config.sglang):
            return specs
        starts_servers = rollout_engine(config) == "sglang"
        size = config.sglang.rollout_num_gpus_per_engine if role == "rollout" and starts_servers else 1
        groups = server_places(self.places, size, len(specs))
        return [
            replace(spec, bundle=group[0].bundle, gpus=tuple(place.gpu for place in group if place.gpu))
            for spec, group in zip(specs, groups, strict=True)
        ]

    def _worker(self, plan: LaunchPlan, spec: WorkerSpec) -> Any:
        options: dict[str, Any] = {"num_cpus": SHARE, "runtime_env": {"env_vars": cpu_environment(spec.threads)}}
        if spec.bundle is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=spec.bundle
            )
            if self.on_gpus:
                options["num_gpus"] = SHARE
        elif plan.graph[spec.role].uses_device:
            options["num_cpus"] = SERVICE_CPUS * SHARE / spec.ranks
        return ray.remote(RoleWorker).options(**options).remote(spec)

    def _collect(self, asked: Mapping[str, list[Any]], doing: str) -> None:
        try:
            for name, refs in asked.items():
                self.built[name].collect(refs, doing)
        except BaseException:
            disregard(ref for refs in asked.values() for ref in refs)
            raise

    def copy_weights(self, version: int) -> None:
        """See `Session.copy_weights`; the references travel inside lists, so that nothing resolves them here."""
        actor, rollout = self.built["actor"], self.built["rollout"]
        with self.roles.actor.awake():
            exported = actor.collect(actor.ask("export_weights"), "export_weights")
        (refs,) = [refs for refs in exported if refs]
        with self.roles.rollout.awake():
            rollout.collect(rollout.ask("load_weights", refs, version), "load_weights")

    def close(self) -> None:
        if self.owns_ray:
            if self.watch.shutdown_hangs and self.guardian is not None:
                self.guardian.close()
            ray.shutdown()
            if self.guardian is not None:
                self.guardian.close()
            return
        for worker in (worker for role in self.built.values() for worker in role.workers):
            ray.kill(worker)
        if self.group is not None:
            ray.util.remove_placement_group(self.group)


def build_order(roles: Sequence[str], *, in_turns: bool) -> list[list[str]]:
    """Which roles are built at the same time: with shared GPUs one, and rollout last, as a server takes all memory."""
    return [[name] for name in sorted(roles, key=lambda name: name == "rollout")] if in_turns else [list(roles)]


def find_places(group: PlacementGroup) -> list[Place]:
    """The bundles in the order of ranks; a short task in each says where it is."""
    probe = ray.remote(probe_place)
    asked = []
    for bundle in range(group.bundle_count):
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
        options = {"num_cpus": SHARE, "num_gpus": SHARE, "scheduling_strategy": strategy}
        asked.append(probe.options(**options).remote(bundle))
    return in_order(ray.get(asked))


def probe_place(bundle: int) -> Place:
    """Where this process is; runs in a bundle with one GPU."""
    (gpu,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return Place(bundle, ray.util.get_node_ip_address(), str(gpu))
