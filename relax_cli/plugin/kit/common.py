"""Checks that both functions of an estimator must pass: what they compute depends on trainable tokens alone.

Legend: `B` samples, `T` response tokens (padded).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor

from relax_cli.plugin.kit.cases import TOLERANCE, Subject, gap, on_tensors, padded, rows_of, tensors_of
from relax_cli.plugin.kit.findings import Finding

SELECT = "select the inputs: torch.where(mask, x, 0); a product with the mask keeps NaN"
"""The fix of most findings."""
GARBAGE = (float("nan"), float("inf"), float("-inf"))
"""What masked slots may contain."""
SCALAR = "loss"
"""The one result that is not per token."""

Check = Callable[[Subject], list[Finding]]
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Function:
    """`advantages` or `policy_loss`, as these checks call it."""

    cases: Callable[[Subject], list[Any]]
    """Batches of inputs, new ones at each call."""
    results: Callable[[Subject, Any], Results]
    """What it computes, by name: numbers per token, and `SCALAR`."""
    row_fix: str
    """What to do where a row depends on its place in the batch."""


def checks_of(function: Function, *own: Check) -> dict[str, Check]:
    """The checks of this module for one of the two functions, and its own ones, by id."""
    common = (pure, all_masked, masked_garbage, padding, row_order)
    checks: list[Any] = [*(update_wrapper(partial(check, function), check) for check in common), *own]
    return {check.__name__.replace("_", "-"): check for check in checks}


def pure(function: Function, subject: Subject) -> list[Finding]:
    """The function leaves its inputs alone and gives the same result twice."""
    inputs, untouched = (function.cases(subject)[-1] for _ in range(2))
    first, second = (function.results(subject, inputs) for _ in range(2))
    found = []
    if wrong := difference(second, first, 0):
        found.append(Finding(f"a second call gives another {wrong}", "remove chance and state from the formula"))
    if difference(tensors_of(inputs), tensors_of(untouched), 0):
        found.append(Finding("the inputs are changed in place", "use x.clamp(), not x.clamp_()"))
    return found


def all_masked(function: Function, subject: Subject) -> list[Finding]:
    """Where nothing is trainable, every result is 0."""
    for inputs in function.cases(subject):
        nothing = with_garbage(replace(inputs, mask=torch.zeros_like(inputs.mask)), float("nan"))
        got = function.results(subject, nothing)
        if wrong := difference(got, {name: torch.zeros_like(x) for name, x in got.items()}, 0):
            return [Finding(f"nothing is trainable, and the {wrong} is not 0", SELECT)]
    return []


def masked_garbage(function: Function, subject: Subject) -> list[Finding]:
    """NaN and inf in masked slots change nothing."""
    for inputs in function.cases(subject):
        clean = function.results(subject, inputs)
        for garbage in GARBAGE:
            if wrong := difference(function.results(subject, with_garbage(inputs, garbage)), clean):
                return [Finding(f"{garbage} in masked slots changes the {wrong}", SELECT)]
    return []


def padding(function: Function, subject: Subject) -> list[Finding]:
    """Masked columns at the end change nothing."""
    for inputs in function.cases(subject):
        width = inputs.mask.shape[1]
        narrow = _per_token(function.results(subject, padded(inputs, 5)), (slice(None), slice(width)))
        if wrong := difference(narrow, function.results(subject, inputs)):
            return [Finding(f"five masked columns more change the {wrong}", "count trainable tokens, not columns")]
    return []


def row_order(function: Function, subject: Subject) -> list[Finding]:
    """Shuffled rows give the same rows, shuffled."""
    for inputs in function.cases(subject):
        order = torch.randperm(inputs.mask.shape[0], generator=torch.Generator().manual_seed(4))
        expected = _per_token(function.results(subject, inputs), order)
        if wrong := difference(function.results(subject, rows_of(inputs, order)), expected):
            return [Finding(f"shuffling the rows changes the {wrong} of a row", function.row_fix)]
    return []


def check_shapes(results: Results, mask: Tensor) -> list[Finding]:
    """Findings about results that are not `[B, T]`, finite, and 0 in masked slots."""
    found = []
    for name, value in results.items():
        if value.shape != mask.shape:
            message = f"{name} has shape {tuple(value.shape)} for a batch of shape {tuple(mask.shape)}"
            found.append(Finding(message, "return one number per token, [B, T]: the trainer reduces them"))
        elif not value.isfinite().all():
            found.append(Finding(f"{name} is not finite for ordinary inputs", "look for log or division of 0"))
        elif value[~mask].any():
            found.append(Finding(f"{name} is not 0 in masked slots", SELECT))
    return found


def with_garbage(record: Any, garbage: float) -> Any:
    """The record with `garbage` in the masked slots of every per-token number."""
    mask = record.mask
    return on_tensors(
        record, lambda x: torch.where(mask, x, garbage) if x.shape == mask.shape and x.is_floating_point() else x
    )


def difference(got: Results, expected: Results, tolerance: float = TOLERANCE) -> str:
    """The first that differs; empty when none does."""
    return next((name for name, value in got.items() if gap(value, expected[name]) > tolerance), "")


def _per_token(results: Results, index: Any) -> Results:
    return {name: value if name == SCALAR else value[index] for name, value in results.items()}
