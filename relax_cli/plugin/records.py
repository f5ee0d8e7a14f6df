"""What plugin hooks return. Frozen, torch-free; adding a field with a default breaks no plugin."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from relax_cli.config.model import base_type, options_by_name
from relax_cli.config.schema import Aggregation, Config, Section
from relax_cli.errors import ConfigError, Problem, RunError, problem_kind
from relax_cli.plugin.user_code import UserCodeError, user_code
from relax_cli.plugin.user_file import accepts, signature_of

if TYPE_CHECKING:
    from torch import Tensor

    from relax_cli.algorithms.types import AdvantageInputs, AdvantageOutputs, LossInputs, LossTerms

ESTIMATOR_FAILED = problem_kind(
    "estimator-failed",
    "During a run",
    "`advantages` or `policy_loss` of an estimator raised an exception, or did not return its record with tensors "
    "`[B, T]`. `relax plugins check` finds such faults before a run.",
)
NAME = re.compile(r"[^\s,=]+")
REFERENCE = problem_kind("plugin-reference", "Plugins", "A plugin refers to a `module:function` that cannot be loaded.")


@dataclass(frozen=True)
class Record:
    """Something that a plugin provides by name."""

    name: str
    """What a user types to choose it."""
    summary: str
    """One line."""
    what: ClassVar[str]
    """Its kind, for messages."""
    references: ClassVar[tuple[str, ...]] = ("function",)
    """The fields that are a `"module:function"`."""

    @property
    def title(self) -> str:
        """For messages: `reward mine`."""
        return f"{self.what} {self.name}"

    def load(self) -> Callable[..., Any]:
        """Import and return the function that it names; raises ConfigError where that leads nowhere."""
        return load_reference(getattr(self, self.references[0]), self.title)


@dataclass(frozen=True)
class Estimator(Record):
    """An advantage estimator with its policy loss (`--advantage-estimator`)."""

    what = "estimator"
    references = ("advantages", "policy_loss")
    paper: str
    """Where the formulas come from."""
    options: type[Section]
    """Option model. Fields that the core schema also has are filled from there; others are new options."""
    advantages: str
    """`"module:function"` taking `AdvantageInputs` and returning `AdvantageOutputs`."""
    policy_loss: str
    """`"module:function"` taking `LossInputs` and returning `LossTerms`."""
    needs_critic: bool = False
    """Advantages are computed from a critic's values."""
    needs_groups: bool = False
    """Advantages are computed against the other samples of the same prompt."""
    loss_aggregation: Aggregation = "sample-mean"
    """What the paper averages the loss over: samples, tokens, or a constant length. Used unless the user says it."""
    ratio_one_is_policy_gradient: bool = True
    """At ratio 1 the gradient of the loss is that of `−A·logp`. Set False where the paper means it otherwise: this
    documents it, and `relax plugins check` leaves that check out."""

    def load_advantages(self) -> Callable[[AdvantageInputs], AdvantageOutputs]:
        """Import and return the advantage function; raises ConfigError where the reference leads nowhere."""
        return load_reference(self.advantages, self.title)

    def load_policy_loss(self) -> Callable[[LossInputs], LossTerms]:
        """Import and return the policy loss; raises ConfigError where the reference leads nowhere."""
        return load_reference(self.policy_loss, self.title)


class EstimatorMath:
    """The two functions of an estimator as the roles call them.
    Raises RunError: one raised, or did not return its record of tensors `[B, T]`; names the line."""

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._advantages = estimator.load_advantages()
        self._policy_loss = estimator.load_policy_loss()

    def advantages(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """Advantages of these rows, and returns where the estimator has a critic."""
        with self._guarded(self._estimator.advantages):
            outputs = self._advantages(inputs)
            _require_grid("advantages", outputs.advantages, inputs.mask)
            if self._estimator.needs_critic or outputs.returns is not None:
                _require_grid("returns", outputs.returns, inputs.mask)
            return outputs

    def policy_loss(self, inputs: LossInputs) -> LossTerms:
        """Loss and metrics per token of one micro-batch."""
        with self._guarded(self._estimator.policy_loss):
            terms = self._policy_loss(inputs)
            for name, value in {"loss_per_token": terms.loss_per_token, **terms.metrics}.items():
                _require_grid(name, value, inputs.mask)
            return terms

    @contextmanager
    def _guarded(self, reference: str) -> Iterator[None]:
        try:
            with user_code():
                yield
        except UserCodeError as error:
            name, expected = self._estimator.name, "its record, every tensor [B, T]"
            what, fix = f"{reference} of the estimator {name} failed", f"relax plugins check {name}"
            problem = ESTIMATOR_FAILED(what, where=error.place, got=error.story, expected=expected, fix=fix)
            raise RunError(problem) from error


def _require_grid(name: str, value: Any, mask: Tensor) -> None:
    shape = getattr(value, "shape", None)
    if shape != mask.shape:
        got = f"a {type(value).__name__}" if shape is None else f"shape {tuple(shape)}"
        raise TypeError(f"{name} must have shape {tuple(mask.shape)}, got {got}")


def unusable(record: Record) -> str:
    """Why a record cannot be used as it is; empty when it can."""
    for name in ("name", *record.references):
        if not isinstance(value := getattr(record, name), str) or not NAME.fullmatch(value):
            return f"{name} of the {record.what} {record.name!r} must be text without blanks, got {value!r}"
    return _options_fault(record) if isinstance(record, Estimator) else ""


def _options_fault(estimator: Estimator) -> str:
    """Why the options of an estimator cannot become flags and recipe keys; empty when they can."""
    options = estimator.options
    if not (isinstance(options, type) and issubclass(options, Section)):
        return f"options of {estimator.name} must be a subclass of relax_cli.Section, got {options!r}"
    core = options_by_name(Config)
    own = {name: field for name, field in options.model_fields.items() if name not in core}
    if own and estimator.name in Config.model_fields:
        return f"{estimator.name!r} is the name of a section of relax, so its options have no place of their own"
    for name, option in own.items():
        if option.is_required():
            return f"option {name} of {estimator.name} has no default"
        try:
            base_type(option)
        except ValueError:
            return f"option {name} of {estimator.name} has a type that no flag can have: {option.annotation}"
    return ""


@dataclass(frozen=True)
class Reward(Record):
    """A named reward function (`--rm-type`)."""

    what = "reward"
    function: str
    """`"module:function"` judging a batch of samples."""


@dataclass(frozen=True)
class Env(Record):
    """A named environment of multi-turn episodes (`--env`)."""

    what = "environment"
    references = ("environment",)
    environment: str
    """`"module:Class"` (or a function that returns an instance) with `reset(row)` and `step(response)`."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """A row (`prompt`, `label`, `metadata`) and `responses`: an episode that `relax plugins check` plays to its end."""


@dataclass(frozen=True)
class Curriculum(Record):
    """A named curriculum (`--curriculum`): which rows come next, by how well each went before."""

    what = "curriculum"
    function: str
    """`"module:function"` taking a `RowHistory` and returning a weight for each row."""


BUILTIN_CURRICULUMS = {
    "learnability": Curriculum(
        "learnability",
        "rows that succeed half of the time come most often, every row comes again",
        "relax_cli.data.curriculum:learnability",
    )
}


def env_fault(target: Any) -> str:
    """Why something is no class or function that makes environments; empty when it is one."""
    if not callable(target):
        return f"a {type(target).__name__}"
    if not accepts(target):
        return f"{signature_of(target)} needs arguments"
    for method, argument in {"reset": "row", "step": "response"}.items() if isinstance(target, type) else ():
        function = getattr(target, method, None)
        if function is None:
            return f"no method {method}"
        if not accepts(function, None, None):
            return f"{method}{signature_of(function)} instead of {method}(self, {argument})"
    return ""


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
    Raises ConfigError: the module cannot be imported or has no such function."""
    try:
        with user_code():
            function: Callable[..., Any] = resolve_name(reference)
            if not callable(function):
                raise TypeError(f"{reference.rpartition(':')[2]} is a {type(function).__name__}, not a function")
    except UserCodeError as error:
        what = f"{owner} refers to {reference!r}, which cannot be loaded"
        fix = "reinstall or update the package that provides it (`relax plugins list` names it)"
        problem = REFERENCE(what, where=error.place, got=error.story, expected="module:function", fix=fix)
        raise ConfigError(problem) from error
    return function
