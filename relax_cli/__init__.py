"""The public plugin API of relax. Importing it imports no torch, and a name's module is imported when it is
used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_cli.algorithms.types import AdvantageInputs as AdvantageInputs
    from relax_cli.algorithms.types import AdvantageOutputs as AdvantageOutputs
    from relax_cli.algorithms.types import LossInputs as LossInputs
    from relax_cli.algorithms.types import LossTerms as LossTerms
    from relax_cli.config.schema import ClipOptions as ClipOptions
    from relax_cli.config.schema import Config as Config
    from relax_cli.config.schema import GaeOptions as GaeOptions
    from relax_cli.config.schema import GroupOptions as GroupOptions
    from relax_cli.config.schema import Section as Section
    from relax_cli.errors import Problem as Problem
    from relax_cli.plugin.graph import RoleSpec as RoleSpec
    from relax_cli.plugin.graph import ServiceGraph as ServiceGraph
    from relax_cli.plugin.hookspecs import hookimpl as hookimpl
    from relax_cli.plugin.records import Change as Change
    from relax_cli.plugin.records import Estimator as Estimator
    from relax_cli.plugin.records import Normalized as Normalized
    from relax_cli.plugin.records import Reward as Reward

_HOME = {
    "AdvantageInputs": "relax_cli.algorithms.types",
    "AdvantageOutputs": "relax_cli.algorithms.types",
    "Change": "relax_cli.plugin.records",
    "ClipOptions": "relax_cli.config.schema",
    "Config": "relax_cli.config.schema",
    "Estimator": "relax_cli.plugin.records",
    "GaeOptions": "relax_cli.config.schema",
    "GroupOptions": "relax_cli.config.schema",
    "LossInputs": "relax_cli.algorithms.types",
    "LossTerms": "relax_cli.algorithms.types",
    "Normalized": "relax_cli.plugin.records",
    "Problem": "relax_cli.errors",
    "Reward": "relax_cli.plugin.records",
    "RoleSpec": "relax_cli.plugin.graph",
    "Section": "relax_cli.config.schema",
    "ServiceGraph": "relax_cli.plugin.graph",
    "hookimpl": "relax_cli.plugin.hookspecs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
