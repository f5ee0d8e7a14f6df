"""Rules about how roles share devices."""

from __future__ import annotations

from collections.abc import Callable

from relax_cli.config.placement import rollout_engine, takes_bundles
from relax_cli.config.schema import Config
from relax_cli.errors import Problem
from relax_cli.preflight.rules.files import Found


def unequal_shapes(config: Config) -> Found:
    """On GPUs, roles that take turns in the same ones are equally large, or some wait."""
    sizes = {
        role: services * devices
        for role, (services, devices) in config.parallel.resource.items()
        if devices > 0 and takes_bundles(role, config.parallel, config.sglang)
    }
    largest = max(sizes.values(), default=0)
    idle = {role: largest - size for role, size in sizes.items() if size < largest}
    if config.parallel.device != "cuda" or not idle:
        return None
    waiting = ", ".join(f"{count} while {role} works" for role, count in idle.items())
    return Problem(
        id="unequal-shapes",
        message=f"roles of unequal size leave GPUs idle: {waiting}",
        fix="give actor, critic and rollout the same number of devices in --resource",
        option="--resource",
        got=", ".join(f"{role} {size}" for role, size in sizes.items()),
        expected=f"{largest} for each",
        severity="warning",
    )


def weight_transport(config: Config) -> Found:
    """On GPUs, weights go to servers of the run through the memory they share, and to others through the network."""
    section, wanted = config.sglang, config.sglang.update_weight_transport
    engine = rollout_engine(config.rollout, section, config.parallel)
    if config.parallel.device != "cuda" or engine != "sglang" or wanted not in ("tensor", "distributed"):
        return None
    if (wanted == "tensor") != section.rollout_external:
        return None
    reason = "nothing is known of their GPUs" if section.rollout_external else "NCCL takes one rank per GPU"
    servers = "external servers" if section.rollout_external else "servers on the actor's own GPUs"
    return Problem(
        id="update-weight-transport",
        message=f"weights cannot go to {servers} by {wanted}: {reason}",
        fix="drop --update-weight-transport, or use --update-weight-transport disk",
        option="--update-weight-transport",
        got=wanted,
        expected="auto, distributed or disk" if section.rollout_external else "auto, tensor or disk",
    )


PLACEMENT_RULES: tuple[Callable[[Config], Found], ...] = (unequal_shapes, weight_transport)
