"""Checks of a policy loss: each takes a `Subject` and returns what it found, nothing when all is well.

Legend: `B` samples, `T` response tokens (padded).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from relax_cli.algorithms.reduce import Mode, aggregate
from relax_cli.algorithms.types import LossInputs
from relax_cli.plugin.kit import cases
from relax_cli.plugin.kit.cases import TOLERANCE, Subject, at_ratio_one, denominator_of, evaluate, gap, loss_inputs
from relax_cli.plugin.kit.common import Function, check_shapes, checks_of
from relax_cli.plugin.kit.findings import Finding

_ROWS = "compute every row from that row alone; the trainer divides by the size of the whole batch"
_MODES: tuple[Mode, ...] = ("token", "sample")
_STEP = 1e-5


def _results(subject: Subject, inputs: LossInputs) -> dict[str, Tensor]:
    got = evaluate(subject, inputs)
    return {"loss": got.loss, "loss per token": got.terms.loss_per_token, "gradient": got.grad_BT}


def shape(subject: Subject) -> list[Finding]:
    """Loss, metrics and gradient are `[B, T]`, finite, and 0 in masked slots."""
    inputs = loss_inputs(subject)
    got = evaluate(subject, inputs)
    results = {"loss_per_token": got.terms.loss_per_token, **got.terms.metrics, "gradient": got.grad_BT}
    return check_shapes(results, inputs.mask)


def micro_batch(subject: Subject) -> list[Finding]:
    """The shares of micro-batches of 1 and 3 rows add up to the loss and the gradient of the whole batch."""
    inputs = loss_inputs(subject)
    for mode in _MODES:
        denominator = denominator_of(inputs, mode)
        whole = evaluate(subject, inputs, mode=mode)
        for size in (1, 3):
            parts = [
                evaluate(subject, cases.rows_of(inputs, rows), mode=mode, denominator=denominator)
                for rows in torch.split(torch.arange(inputs.mask.shape[0]), size)
            ]
            loss = torch.stack([part.loss for part in parts]).sum()
            grad_BT = torch.cat([part.grad_BT for part in parts])
            if max(gap(loss, whole.loss), gap(grad_BT, whole.grad_BT)) > TOLERANCE:
                return [Finding(f"micro-batches of {size} give another loss or gradient than one of 8", _ROWS)]
    return []


def gradient(subject: Subject) -> list[Finding]:
    """The gradient is the derivative of the loss by central differences in float64.

    What the formula computes without gradient (`detach`, `no_grad`) keeps its value while `logp` is varied.
    """
    inputs = loss_inputs(subject)
    held = HeldConstants()

    def loss_at(logp: Tensor) -> Tensor:
        with held:
            terms = subject.policy_loss(replace(inputs, logp=logp.requires_grad_()))
        return aggregate(terms.loss_per_token, inputs.mask, mode="token", denominator=1)

    logp = inputs.logp.clone()
    loss = loss_at(logp)
    if loss.dtype != torch.float64:
        message = f"float64 inputs give a {loss.dtype} loss, too coarse to check its gradient"
        return [Finding(message, "keep float64: relax_cli.algorithms.masking.select widens to at least float32")]
    (grad_BT,) = torch.autograd.grad(loss, logp)

    def moved(row: int, column: int, step: float) -> float:
        other = inputs.logp.clone()
        other[row, column] += step
        held.next = 0
        return float(loss_at(other).detach())

    for row, column in inputs.mask.nonzero().tolist():
        numeric = (moved(row, column, _STEP) - moved(row, column, -_STEP)) / (2 * _STEP)
        exact = float(grad_BT[row, column])
        if not abs(exact - numeric) <= TOLERANCE * max(1.0, abs(numeric)):
            what = f"the gradient of token {column} of row {row} is {exact:.6g}, finite differences give {numeric:.6g}"
            return [Finding(what, "look for .float(), .item(), .data or a custom backward in the formula")]
    return []


def ratio_one(subject: Subject) -> list[Finding]:
    """Before the first update the gradient is that of `−A·logp`, the plain policy gradient."""
    inputs = at_ratio_one(loss_inputs(subject))
    got_BT = evaluate(subject, inputs).grad_BT
    expected_BT = torch.where(inputs.mask, -inputs.advantages, 0.0) / denominator_of(inputs, "token")
    if gap(got_BT, expected_BT) <= TOLERANCE:
        return []
    row, column = divmod(int((got_BT - expected_BT).abs().nan_to_num(torch.inf).argmax()), got_BT.shape[1])
    got, expected = (f"{float(x[row, column]):.4g}" for x in (got_BT, expected_BT))
    what = f"at ratio 1 the gradient of token {column} of row {row} is {got}, the plain policy gradient {expected}"
    fix = "look for a missing detach or a wrong factor; where the paper means it so, set "
    return [Finding(what, f"{fix}ratio_one_is_policy_gradient=False on the Estimator")]


def sign(subject: Subject) -> list[Finding]:
    """A step down the loss makes samples with a positive advantage likelier, and others less likely."""
    inputs = at_ratio_one(loss_inputs(subject))
    inputs = replace(inputs, advantages=torch.where(inputs.mask, inputs.advantages[:, :1].sign(), 0.0))
    push_B = -(evaluate(subject, inputs).grad_BT * inputs.advantages).sum(dim=1)
    trained_B = (inputs.advantages != 0).any(dim=1)
    if bool((push_B[trained_B] > 0).all()):
        return []
    message = "a step down the loss makes samples with a positive advantage less likely (or does not move them)"
    return [Finding(message, "the loss is minimised: it starts with a minus")]


def detached(subject: Subject) -> list[Finding]:
    """Advantages and old log-probabilities get no gradient."""
    inputs = loss_inputs(subject)
    names = ("advantages", "old_logp", "rollout_logp")
    leaves = {name: getattr(inputs, name).clone().requires_grad_() for name in names}
    logp = inputs.logp.clone().requires_grad_()
    loss = subject.policy_loss(replace(inputs, logp=logp, **leaves)).loss_per_token.sum()
    if not loss.requires_grad:
        return [Finding("the loss has no gradient at all", "do not detach logp everywhere")]
    grads = torch.autograd.grad(loss, [logp, *leaves.values()], allow_unused=True)[1:]
    return [
        Finding(f"a gradient reaches {name}", f"detach it: inputs.{name}.detach()")
        for name, grad in zip(names, grads, strict=True)
        if grad is not None and bool(grad.any())
    ]


FUNCTION = Function(lambda subject: [loss_inputs(subject)], _results, _ROWS)
CHECKS = checks_of(FUNCTION, shape, micro_batch, gradient, ratio_one, sign, detached)


class HeldConstants(TorchFunctionMode):
    """Keeps what a formula computes without gradient, and hands it out again while an input is varied.

    A formula such as `−sg(r)·A·logp` is not the antiderivative of its gradient; with `sg(r)` held it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.next: int | None = None
        """Position in `kept` of the next value to hand out, 0 to hand out all again; None while recording."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every torch operation inside the `with` block."""
        result = func(*args, **(kwargs or {}))
        is_constant = getattr(func, "__name__", "") == "detach" or not torch.is_grad_enabled()
        if not isinstance(result, Tensor) or not is_constant:
            return result
        if self.next is None:
            self.kept.append(result.clone())
            return result
        held = self.kept[self.next] if self.next < len(self.kept) else result
        self.next += 1
        # A branch that only the varied input takes has nothing to hand out.
        return held.clone() if held.shape == result.shape and held.dtype == result.dtype else result
