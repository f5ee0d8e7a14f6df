"""An estimator's two functions as the roles call them: what they raise or return wrongly is named with its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from relax_cli.errors import RunError, problem_kind
from relax_cli.plugin.records import Estimator
from relax_cli.plugin.user_code import UserCodeError, user_code

if TYPE_CHECKING:
    from torch import Tensor

    from relax_cli.algorithms.types import AdvantageInputs, AdvantageOutputs, LossInputs, LossTerms

T = TypeVar("T")
ESTIMATOR_FAILED = problem_kind(
    "estimator-failed",
    "During a run",
    "`advantages` or `policy_loss` of an estimator raised an exception, or did not return its record with tensors "
    "`[B, T]`. `relax plugins check` finds such faults before a run.",
)


class EstimatorMath:
    """Advantages and policy loss of one estimator."""

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._advantages = estimator.load_advantages()
        self._policy_loss = estimator.load_policy_loss()

    def advantages(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """Advantages of these rows, and returns where the estimator has a critic.
        Raises RunError: the function raised, or returned something else."""

        def run() -> AdvantageOutputs:
            outputs = self._advantages(inputs)
            _require_grid("advantages", outputs.advantages, inputs.mask)
            if self._estimator.needs_critic or outputs.returns is not None:
                _require_grid("returns", outputs.returns, inputs.mask)
            return outputs

        return self._guarded(self._estimator.advantages, run)

    def policy_loss(self, inputs: LossInputs) -> LossTerms:
        """Loss and metrics per token of one micro-batch.
        Raises RunError: the function raised, or returned something else."""

        def run() -> LossTerms:
            terms = self._policy_loss(inputs)
            for name, value in {"loss_per_token": terms.loss_per_token, **terms.metrics}.items():
                _require_grid(name, value, inputs.mask)
            return terms

        return self._guarded(self._estimator.policy_loss, run)

    def _guarded(self, reference: str, run: Callable[[], T]) -> T:
        try:
            with user_code():
                return run()
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
