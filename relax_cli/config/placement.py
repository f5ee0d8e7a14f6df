"""Arithmetic of worker processes, placement bundles and logical CPUs; pure, so that it is known before a launch."""

from __future__ import annotations

from typing import Literal

from relax_cli.config.layers import known
from relax_cli.config.schema import Config, ParallelSection, SglangSection

STORAGE_UNITS = 1
"""TransferQueue storage processes; each, and its controller, asks Ray for one logical CPU."""

QUEUE_CPUS = STORAGE_UNITS + 1

SERVICE_CPUS = 1
"""For all services without a device together; each asks for a part of it."""


def rollout_engine(config: Config) -> Literal["embedded", "sglang"]:
    """The engine that generates, `--rollout-engine auto` resolved."""
    if config.rollout.rollout_engine != "auto":
        return config.rollout.rollout_engine
    return "sglang" if config.parallel.device == "cuda" or config.sglang.rollout_external else "embedded"


SMALLEST_OBJECT_STORE = 256 << 20
SERVERS_OBJECT_STORE = 2 << 30
WEIGHT_COPIES = 6
"""Of the embedded engines' weights: the published version and the one before it, while ranks put and read them."""


def object_store_bytes(engine: Literal["embedded", "sglang"], weights: int) -> int:
    """Bytes of Ray's object store on a machine of its own; weights for SGLang servers never pass through it."""
    return SERVERS_OBJECT_STORE if engine == "sglang" else max(SMALLEST_OBJECT_STORE, WEIGHT_COPIES * weights)


# Limits of the embedded rollout engine, which the memory plan also counts with.
MOST_ROWS = 256
KV_CACHE_BYTES = 1 << 30
"""Most bytes of its key/value cache, unless a single row needs more."""
PREFILL_TOKENS = 512


def has_counts(config: Config) -> bool:
    """Whether `--resource` says how many processes there are; rules say why not."""
    resource = known(lambda: config.parallel.resource) or {}
    return bool(resource) and all(min(counts) >= 0 for counts in resource.values())


def ranks_of(parallel: ParallelSection, role: str) -> int:
    """Worker processes of a role; a service without a device still is one process."""
    services, devices = parallel.resource[role]
    return max(1, services * devices)


def processes_of(role: str, config: Config) -> int:
    """Worker processes of a role: one a rank, but of rollout one for each SGLang server that the run starts."""
    ranks, sglang = ranks_of(config.parallel, role), config.sglang
    starts_servers = rollout_engine(config) == "sglang" and not sglang.rollout_external
    return max(1, ranks // sglang.rollout_num_gpus_per_engine) if role == "rollout" and starts_servers else ranks


def takes_bundles(role: str, parallel: ParallelSection, sglang: SglangSection) -> bool:
    """Whether a role sits in the placement group: it has devices here. External servers bring their own."""
    return parallel.resource[role][1] > 0 and not (role == "rollout" and sglang.rollout_external)


def shared_bundles(parallel: ParallelSection, sglang: SglangSection) -> int:
    """Bundles of the placement group that the roles with devices share: as many as the largest has ranks."""
    sizes = (ranks_of(parallel, role) for role in parallel.resource if takes_bundles(role, parallel, sglang))
    return max(sizes, default=1)


def needed_cpus(parallel: ParallelSection, sglang: SglangSection) -> int:
    """Logical CPUs a run takes from Ray: one a bundle, the services without a device, TransferQueue."""
    return shared_bundles(parallel, sglang) + SERVICE_CPUS + QUEUE_CPUS


def threads_of(parallel: ParallelSection, role: str, cores: int) -> int:
    """CPU threads of one rank, so that the ranks that work at the same time together use every core once."""
    if parallel.threads_per_rank is not None:
        return parallel.threads_per_rank
    working = ranks_of(parallel, role)
    if parallel.overlap_updates and role in ("actor", "critic"):
        working = sum(ranks_of(parallel, name) for name in ("actor", "critic") if name in parallel.resource)
    return max(1, cores // working)
