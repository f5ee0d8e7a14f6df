"""Rules about how roles share devices."""

from __future__ import annotations

from collections.abc import Callable

from relax_cli.config.file_checks import Found
from relax_cli.config.schema import Config
from relax_cli.errors import Problem


def unequal_shapes(config: Config) -> Found:
    """On GPUs, roles that take turns in the same ones are equally large, or some wait."""
    sizes = {role: services * devices for role, (services, devices) in config.parallel.resource.items() if devices > 0}
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


PLACEMENT_RULES: tuple[Callable[[Config], Found], ...] = (unequal_shapes,)
