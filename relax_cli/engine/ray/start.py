"""Starts Ray, on this machine alone or as part of a cluster, and looks whether it is large enough."""

from __future__ import annotations

import ipaddress
import os
import secrets
import signal
import time
from typing import Any

import ray

from relax_cli.config.placement import needed_cpus, object_store_bytes, rollout_engine, shared_bundles
from relax_cli.engine import imports
from relax_cli.engine.forks import worker_python
from relax_cli.engine.ray.problems import check_reachable, not_local, start_failed, too_few_cpus, too_few_gpus
from relax_cli.engine.ray.queue_keys import refuse_second_queue
from relax_cli.errors import EnvironmentFault, RunError
from relax_cli.models.files import weight_bytes
from relax_cli.plugin.launch_plan import LaunchPlan


def start_ray(plan: LaunchPlan) -> None:
    """A Ray of our own on this machine, or the cluster that RAY_ADDRESS names.

    A local one gets as many logical CPUs as the run needs, on any number of cores: roles take turns, and
    TransferQueue waits for ever for a CPU it cannot get.

    Raises:
        EnvironmentFault: Ray did not start.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Every worker has an environment of its own, so those that Ray starts in advance are never used.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    address = os.environ.get("RAY_ADDRESS")
    if address:
        _init_ray(address)
        return
    _give_token()
    config = plan.config
    engine = rollout_engine(config.rollout, config.sglang, config.parallel)
    on_cpu = config.parallel.device != "cuda"
    _init_ray(
        "local",
        num_cpus=config.parallel.ray_num_cpus or needed_cpus(config.parallel, config.sglang),
        include_dashboard=False,
        object_store_memory=object_store_bytes(engine, weight_bytes(plan.model_folder)),
        runtime_env={"worker_process_setup_hook": imports.HOOK} | (worker_python() if on_cpu else {}),
    )
    at = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(at).is_loopback:
        raise EnvironmentFault(not_local(at))


def _give_token() -> None:
    """Ray's processes answer only calls with a token. Ray keeps one in the home folder, which may not be writable."""
    given = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if not given and not os.path.exists(os.path.expanduser("~/.ray/auth_token")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _init_ray(address: str | None, **options: Any) -> None:
    check_reachable(address)
    # ray.init puts an aborting SIGTERM handler in the place of ours.
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR", **options)
    except Exception as error:
        # Ray raises bare Exceptions where a process of it is slow to start.
        raise EnvironmentFault(start_failed(address, error)) from error
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)


def cluster_gpus() -> int:
    """GPUs of the cluster that RAY_ADDRESS names, free or not.

    Raises:
        EnvironmentFault: there is no such cluster.
    """
    _init_ray(os.environ.get("RAY_ADDRESS"))
    try:
        return int(ray.cluster_resources().get("GPU", 0))
    finally:
        ray.shutdown()


def check_resources(plan: LaunchPlan) -> None:
    """Refuse before anything waits for CPUs or GPUs that will never be there; waits `patience` seconds for them.

    Raises:
        EnvironmentFault: the cluster has fewer free logical CPUs, or fewer GPUs at all, than the run needs.
        RunError: it has the queue of another run.
    """
    deadline = time.monotonic() + plan.patience
    while True:
        try:
            _check_now(plan)
            return
        except (EnvironmentFault, RunError) as fault:
            if time.monotonic() >= deadline:
                raise
            (problem,) = fault.problems
            plan.status(f"waiting up to {plan.patience:.0f} s: {problem.message} ({problem.got})")
            time.sleep(1.0)


def _check_now(plan: LaunchPlan) -> None:
    gpus = shared_bundles(plan.config.parallel, plan.config.sglang) if plan.config.parallel.device == "cuda" else 0
    there = int(ray.cluster_resources().get("GPU", 0))
    if there < gpus:
        raise EnvironmentFault(too_few_gpus(there, gpus))
    free, needed = ray.available_resources().get("CPU", 0.0), needed_cpus(plan.config.parallel, plan.config.sglang)
    if free < needed:
        raise EnvironmentFault(too_few_cpus(plan, free, needed))
    refuse_second_queue()
