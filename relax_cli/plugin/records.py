"""What plugin hooks return. Frozen, torch-free; adding a field with a default breaks no plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from relax_cli.config.schema import Config, Section
from relax_cli.errors import ConfigError, Problem

if TYPE_CHECKING:
    from relax_cli.algorithms.types import AdvantageInputs, AdvantageOutputs, LossInputs, LossTerms


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator with its policy loss."""

    name: str
    """What a user types after `--advantage-estimator`."""
    summary: str
    """One line."""
    paper: str
    """Where the formulas come from."""
    options: type[Section]
    """Option model. Fields that the core schema has, too, are filled from there; others are new options."""
    advantages: str
    """`"module:function"` taking `AdvantageInputs` and returning `AdvantageOutputs`."""
    policy_loss: str
    """`"module:function"` taking `LossInputs` and returning `LossTerms`."""
    needs_critic: bool = False
    """Advantages are computed from a critic's values."""
    needs_groups: bool = False
    """Advantages are computed against the other samples of the same prompt."""

    def load_advantages(self) -> Callable[[AdvantageInputs], AdvantageOutputs]:
        """Import and return the advantage function.

        Raises:
            ConfigError: the reference does not lead to a function.
        """
        function: Callable[[AdvantageInputs], AdvantageOutputs] = load_reference(
            self.advantages, f"estimator {self.name}"
        )
        return function

    def load_policy_loss(self) -> Callable[[LossInputs], LossTerms]:
        """Import and return the policy loss.

        Raises:
            ConfigError: the reference does not lead to a function.
        """
        function: Callable[[LossInputs], LossTerms] = load_reference(self.policy_loss, f"estimator {self.name}")
        return function


@dataclass(frozen=True)
class Reward:
    """A named reward function."""

    name: str
    """What a user types after `--rm-type`."""
    summary: str
    """One line."""
    function: str
    """`"module:function"` judging a batch of samples."""

    def load(self) -> Callable[..., Any]:
        """Import and return the function.

        Raises:
            ConfigError: the reference does not lead to a function.
        """
        return load_reference(self.function, f"reward {self.name}")


@dataclass(frozen=True)
class Change:
    """One option that normalisation set to another value."""

    option: str
    """As a user types it, for example `--kl-coef`."""
    before: Any
    after: Any
    why: str
    """One sentence."""


@dataclass(frozen=True)
class Normalized:
    """A configuration after an estimator had its say."""

    config: Config
    changes: tuple[Change, ...] = ()
    warnings: tuple[Problem, ...] = ()


def load_reference(reference: str, owner: str) -> Callable[..., Any]:
    """Resolve `"module:function"` for the plugin record `owner`.

    Raises:
        ConfigError: the module cannot be imported or has no such function.
    """
    module_name, _, attribute = reference.partition(":")
    try:
        function = getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            Problem(
                id="plugin-reference",
                message=f"{owner} refers to {reference!r}, which cannot be loaded",
                got=f"{type(error).__name__}: {error}",
                expected="module:function",
                fix="reinstall or update the package that provides it (`relax plugins list` names it)",
            )
        ) from error
    assert callable(function), f"{owner}: {reference} is not callable"
    resolved: Callable[..., Any] = function
    return resolved
