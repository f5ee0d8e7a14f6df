"""The built-in plugins without any that are installed, and the types of the fixtures that run a command line."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib.metadata import EntryPoint

from typer.testing import Result

from relax_cli.plugin.manager import GROUP, Plugins

BUILT_IN = ("ppo", "grpo", "gspo", "cispo", "sapo")

Invoke = Callable[..., Result]
Process = Callable[..., "subprocess.CompletedProcess[str]"]


def built_in_plugins() -> Plugins:
    """The five plugins of this repository."""
    return Plugins([EntryPoint(name, f"relax_{name}", GROUP) for name in BUILT_IN])
