"""Rules about activations that are computed again. See `checks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from relax_cli.config.recipes import nearest
from relax_cli.config.schema import Config
from relax_cli.errors import Problem

if TYPE_CHECKING:
    from relax_cli.preflight.rules.files import Found

MODULES = ("core_attn", "mlp")
"""Parts of a dense layer that Megatron-core can compute again by themselves.

Not norms: without TransformerEngine that fails in Megatron-core (0.16, 0.19), and with it there is no such part,
because the norms of these layers are computed together with the matrix product behind them.
"""


def full_recomputation(config: Config) -> Found:
    """Megatron-core wants to be told how many layers full recomputation takes at a time."""
    section = config.parallel
    if section.recompute_granularity != "full":
        return None
    missing = [
        option
        for option, value in (
            ("--recompute-method", section.recompute_method),
            ("--recompute-num-layers", section.recompute_num_layers),
        )
        if value is None
    ]
    if not missing:
        return None
    defaults = {"--recompute-method": "uniform", "--recompute-num-layers": "1"}
    return Problem(
        id="recompute-incomplete",
        message="full recomputation needs to know which layers, and how many at a time",
        fix=" ".join(f"{option} {defaults[option]}" for option in missing),
        option=missing[0],
        expected="uniform (chunks of layers) or block (the first layers), and a number",
    )


def modules(config: Config) -> Found:
    """Modules of selective recomputation are parts of a dense layer."""
    return [
        Problem(
            id="recompute-module-unknown",
            message=f"{name!r} is no part of a layer that can be computed again by itself",
            fix=f"--recompute-modules {nearest(name, MODULES) or MODULES[0]}",
            option="--recompute-modules",
            got=name,
            expected=", ".join(MODULES),
        )
        for name in config.parallel.recompute_modules
        if name not in MODULES
    ]


RECOMPUTE_RULES: tuple[Callable[[Config], Found], ...] = (full_recomputation, modules)
