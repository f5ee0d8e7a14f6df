"""Starts Ray, on this machine alone or as part of a cluster, and looks whether it is large enough."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import signal
import socket
import time
from typing import Any

import ray

from relax_cli.config import placement
from relax_cli.engine import imports
from relax_cli.engine.forks import worker_python
from relax_cli.engine.ray import LOOPBACK_SWITCH
from relax_cli.engine.ray.queue_keys import refuse_second_queue
from relax_cli.errors import LIMITS, MACHINE_THEME, EnvironmentFault, Problem, RunError, problem_kind, problem_kinds
from relax_cli.models.files import weight_bytes
from relax_cli.plugin.launch_plan import LaunchPlan
from relax_cli.preflight.machine import ray_address, ray_temp_folder
from relax_cli.preflight.rules.resources import ray_cpus

CONNECTING_SECONDS = 20.0

this_machine = problem_kinds(MACHINE_THEME)
RAY_START_FAILED = this_machine(
    "ray-start-failed",
    "Ray did not start, or the cluster of `RAY_ADDRESS` does not answer. The fix depends on the cause: a busy machine, "
    "a path too long for a socket, a folder that cannot be written, a full disk, too little memory, another version.",
)
RAY_NOT_LOCAL = this_machine(
    "ray-not-local",
    "Ray was to start on this machine alone, but listens on an address that other machines can reach.",
)
RAY_GPUS = problem_kind(
    "ray-gpus",
    "Roles, devices, parallelism",
    "The Ray cluster has fewer GPUs, busy ones included, than the roles share. A run waits for GPUs that others use.",
    option="--resource",
)

CAUSES = {
    "AF_UNIX|File name too long": "export RAY_TMPDIR=/tmp (or another short folder): Ray's sockets need short paths",
    r"Permission denied|Read-only file system|\[Errno (13|30)\]": "export HOME and RAY_TMPDIR as folders that this "
    "user can write, or use --launcher local",
    r"No space left|\[Errno 28\]|Disk quota|/dev/shm|object store": "make room: df -h /dev/shm {folder}; RAY_TMPDIR "
    "names another disk",
    "low on memory|OutOfMemory|Cannot allocate memory|SIGKILL": "free memory (free -h shows it), or use fewer ranks in "
    "--resource; --launcher local needs the least",
    "[Vv]ersion mismatch": "install the Ray and Python versions of the cluster here: pip install 'ray==VERSION'",
    **LIMITS,
}
"""What Ray says in its different troubles, and what helps."""


def start_failed(address: str, error: BaseException) -> Problem:
    """The problem of a Ray that did not start, by its cause; its address is `local` or that of a cluster."""
    local, folder, said = address == "local", ray_temp_folder(), f"{type(error).__name__}: {error}"
    known = [advice for cause, advice in CAUSES.items() if re.search(cause, said)]
    lines = said.splitlines()
    telling = next((line for line in lines if re.search("|".join(CAUSES), line)), lines[0])
    if known:
        fix = known[0].format(folder=folder)
    elif local:
        fix = "end what keeps this machine busy and start again; `ray stop` ends every Ray that you left running here"
    elif isinstance(error, ValueError):
        fix = "set RAY_ADDRESS to the HOST:PORT that `ray start --head` prints, or unset it"
    else:
        fix = f"ray status --address {address} shows whether it runs; unset RAY_ADDRESS starts a Ray of the run's own"
    if local:
        fix += f"; Ray's logs are in {folder}/ray/session_latest/logs"
    return RAY_START_FAILED(
        "Ray did not start" if local else "the Ray cluster of RAY_ADDRESS cannot be joined",
        where="this machine" if local else f"RAY_ADDRESS={address}",
        got=telling.strip()[:300],
        expected="a Ray that answers",
        fix=fix,
    )


def start_ray(plan: LaunchPlan) -> None:
    """A Ray of our own on this machine, or the cluster that RAY_ADDRESS names.

    A local one gets as many logical CPUs as the run needs, on any number of cores: roles take turns, and
    TransferQueue waits for ever for a CPU it cannot get.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Every worker has an environment of its own, so those that Ray starts in advance are never used.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    if address := ray_address():
        _init_ray(address)
        return
    given = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if not given and not os.path.exists(os.path.expanduser("~/.ray/auth_token")):
        # Ray's processes answer only calls with a token, which it would keep in a home folder that may be read-only.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    config = plan.config
    engine = placement.rollout_engine(config)
    on_cpu = config.parallel.device != "cuda"
    _init_ray(
        "local",
        num_cpus=config.parallel.ray_num_cpus or placement.needed_cpus(config.parallel, config.sglang),
        include_dashboard=False,
        object_store_memory=placement.object_store_bytes(engine, weight_bytes(plan.model_folder)),
        runtime_env={"worker_process_setup_hook": imports.HOOK} | (worker_python() if on_cpu else {}),
    )
    at = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(at).is_loopback:
        raise EnvironmentFault(
            RAY_NOT_LOCAL(
                "Ray listens on an address that other machines can reach",
                where=at,
                got=f"{LOOPBACK_SWITCH}={os.environ.get(LOOPBACK_SWITCH, '')}, set when Ray was imported",
                expected="127.0.0.1",
                fix=f"export {LOOPBACK_SWITCH}=0 before the process starts that imports ray",
            )
        )


def _init_ray(address: str, **options: Any) -> None:
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdigit():
        # Where nothing listens Ray would keep trying for minutes.
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECTING_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise EnvironmentFault(start_failed(address, error)) from error
    # ray.init puts an aborting SIGTERM handler in the place of ours.
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR", **options)
    except (Exception, SystemExit) as error:
        # Ray raises bare Exceptions where a process of it is slow to start, and exits where a server is not Ray's.
        raise EnvironmentFault(start_failed(address, error)) from error
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)


def cluster_gpus() -> int:
    """GPUs of the cluster that RAY_ADDRESS names, free or not. Raises EnvironmentFault: there is no such cluster."""
    _init_ray(ray_address())
    try:
        return int(ray.cluster_resources().get("GPU", 0))
    finally:
        ray.shutdown()


def check_resources(plan: LaunchPlan) -> None:
    """Refuse before anything waits for CPUs or GPUs that will never be there; waits `patience` seconds for them.
    Raises EnvironmentFault: there are too few. Raises RunError: the cluster has the queue of another run."""
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
    parallel, sglang = plan.config.parallel, plan.config.sglang
    gpus = placement.shared_bundles(parallel, sglang) if parallel.device == "cuda" else 0
    # Busy ones included: a run waits for GPUs that others use.
    there = int(ray.cluster_resources().get("GPU", 0))
    if there < gpus:
        raise EnvironmentFault(
            RAY_GPUS(
                "Ray has too few GPUs for the roles",
                where="the Ray cluster",
                got=f"{there} GPUs",
                expected=f"at least {gpus}",
                fix="lower the counts in --resource, join a larger cluster (RAY_ADDRESS), or use --device cpu",
            )
        )
    free, needed = ray.available_resources().get("CPU", 0.0), placement.needed_cpus(parallel, sglang)
    if free < needed:
        roles = ", ".join(f"{role.name} {placement.ranks_of(parallel, role.name)}" for role in plan.graph.roles)
        raise EnvironmentFault(
            ray_cpus.kind(
                "Ray has too few free logical CPUs for the roles and TransferQueue",
                where="the Ray cluster",
                got=f"{free:g} free",
                expected=f"at least {needed} ({roles}, TransferQueue {placement.QUEUE_CPUS})",
                option="--resource",
                fix=f"use fewer workers in --resource, or start Ray with more: ray start --head --num-cpus {needed}",
            )
        )
    refuse_second_queue()
