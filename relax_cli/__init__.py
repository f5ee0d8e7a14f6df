"""The public plugin API of relax. Importing it imports no torch, and a name's module is imported when it is
used.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_cli.algorithms.types import AdvantageInputs as AdvantageInputs
    from relax_cli.algorithms.types import AdvantageOutputs as AdvantageOutputs
    from relax_cli.algorithms.types import LossInputs as LossInputs
    from relax_cli.algorithms.types import LossTerms as LossTerms
    from relax_cli.config.schema import Config as Config
    from relax_cli.config.section import ClipOptions as ClipOptions
    from relax_cli.config.section import ClipRange as ClipRange
    from relax_cli.config.section import GaeOptions as GaeOptions
    from relax_cli.config.section import GroupOptions as GroupOptions
    from relax_cli.config.section import Section as Section
    from relax_cli.data.curriculum import RowHistory as RowHistory
    from relax_cli.data.envs.load import EnvRow as EnvRow
    from relax_cli.data.rewards.types import RewardInput as RewardInput
    from relax_cli.data.rewards.types import RewardResult as RewardResult
    from relax_cli.errors import Problem as Problem
    from relax_cli.errors import problem_kind as problem_kind
    from relax_cli.plugin.graph import RoleSpec as RoleSpec
    from relax_cli.plugin.graph import ServiceGraph as ServiceGraph
    from relax_cli.plugin.hookspecs import hookimpl as hookimpl
    from relax_cli.plugin.launch_plan import LaunchPlan as LaunchPlan
    from relax_cli.plugin.records import Change as Change
    from relax_cli.plugin.records import Curriculum as Curriculum
    from relax_cli.plugin.records import Env as Env
    from relax_cli.plugin.records import Estimator as Estimator
    from relax_cli.plugin.records import Normalized as Normalized
    from relax_cli.plugin.records import Reward as Reward
    from relax_cli.plugin.trackers import TrackedRun as TrackedRun
    from relax_cli.plugin.trackers import Tracker as Tracker


def lazy_attributes(module: str, **references: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose import must be cheap.

    For example `__getattr__ = lazy_attributes(__name__, policy_loss="relax_mine.loss:policy_loss")`: torch is imported
    when `relax_mine.policy_loss` is read.
    """

    def load(name: str) -> Any:
        if name not in references:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return resolve_name(references[name])

    return load


_HOMES = {
    "relax_cli.algorithms.types": ("AdvantageInputs", "AdvantageOutputs", "LossInputs", "LossTerms"),
    "relax_cli.config.schema": ("Config",),
    "relax_cli.config.section": ("ClipOptions", "ClipRange", "GaeOptions", "GroupOptions", "Section"),
    "relax_cli.data.curriculum": ("RowHistory",),
    "relax_cli.data.envs.load": ("EnvRow",),
    "relax_cli.data.rewards.types": ("RewardInput", "RewardResult"),
    "relax_cli.errors": ("Problem", "problem_kind"),
    "relax_cli.plugin.graph": ("RoleSpec", "ServiceGraph"),
    "relax_cli.plugin.hookspecs": ("hookimpl",),
    "relax_cli.plugin.launch_plan": ("LaunchPlan",),
    "relax_cli.plugin.records": ("Change", "Curriculum", "Env", "Estimator", "Normalized", "Reward"),
    "relax_cli.plugin.trackers": ("TrackedRun", "Tracker"),
}
_NAMES = {name: f"{home}:{name}" for home, names in _HOMES.items() for name in names}
__getattr__ = lazy_attributes(__name__, **_NAMES)


def __dir__() -> list[str]:
    return sorted([*_NAMES, "lazy_attributes"])
