"""The built-in plugins without any that are installed, and the types of the fixtures that run a command line."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from typer.testing import Result

from relax_cli.plugin.manager import GROUP, Plugins

BUILT_IN = ("ppo", "grpo", "gspo", "cispo", "sapo")

HEAVY = ("torch", "ray", "sglang", "megatron", "transformers", "transfer_queue", "numpy")
"""Packages that looking at relax must not import."""
MAIN = "import sys; from relax_cli.cli.app import main; code = main(sys.argv[1:] or {argv!r}); "
"""A program that runs the command line `argv`."""

Invoke = Callable[..., Result]
Process = Callable[..., "subprocess.CompletedProcess[str]"]


def built_in_entries() -> list[EntryPoint]:
    """Their entry points with their distribution: relax tries the code of others in a process of its own."""
    found = {entry.name: entry for entry in entry_points(group=GROUP) if entry.value == f"relax_{entry.name}"}
    return [found[name] for name in BUILT_IN]


def built_in_plugins() -> Plugins:
    """The five plugins of this repository."""
    return Plugins(built_in_entries())
