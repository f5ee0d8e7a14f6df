"""Arithmetic of worker processes, placement bundles and logical CPUs; pure, so that it is known before a launch."""

from __future__ import annotations

from relax_cli.config.schema import ParallelSection

STORAGE_UNITS = 1
"""TransferQueue storage processes; each, and its controller, asks Ray for one logical CPU."""

QUEUE_CPUS = STORAGE_UNITS + 1

SERVICE_CPUS = 1
"""For all services without a device together; each asks for a part of it."""


def ranks_of(parallel: ParallelSection, role: str) -> int:
    """Worker processes of a role; a service without a device still is one process."""
    services, devices = parallel.resource[role]
    return max(1, services * devices)


def shared_bundles(parallel: ParallelSection) -> int:
    """Bundles of the placement group that the roles with devices share: as many as the largest has ranks."""
    return max((ranks_of(parallel, role) for role, (_, devices) in parallel.resource.items() if devices), default=1)


def needed_cpus(parallel: ParallelSection) -> int:
    """Logical CPUs a run takes from Ray: one a bundle, the CPU-only services, TransferQueue."""
    return shared_bundles(parallel) + SERVICE_CPUS + QUEUE_CPUS


def threads_of(parallel: ParallelSection, role: str, cores: int) -> int:
    """CPU threads of one rank, so that the ranks that work at the same time together use every core once."""
    if parallel.threads_per_rank is not None:
        return parallel.threads_per_rank
    working = ranks_of(parallel, role)
    if parallel.overlap_updates and role in ("actor", "critic"):
        working = sum(ranks_of(parallel, name) for name in ("actor", "critic") if name in parallel.resource)
    return max(1, cores // working)
