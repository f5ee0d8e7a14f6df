"""What the checks of the conformance kit work on: fixed small batches, and one way to compute loss and gradient.

Legend: `B` samples, `T` response tokens (padded).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from relax_cli.algorithms.reduce import Mode, aggregate
from relax_cli.algorithms.types import AdvantageInputs, AdvantageOutputs, LossInputs, LossTerms
from relax_cli.config.schema import Section
from relax_cli.plugin.records import Estimator

R = TypeVar("R", LossInputs, AdvantageInputs)

_LENGTHS = (7, 5, 7, 1, 3, 6, 7, 4)
_GROUPS = (9, 4, 9, 1000, 4, 9, 1000, 4)
"""Neither sorted nor side by side, sizes 3, 3 and 2: nothing may lean on the order of the rows."""
_REWARDS = (1.0, 0.25, -0.5, 2.0, 0.75, 0.5, -1.0, 1.5)
UNTRAINED = 4
"""The row without a trainable token."""


@dataclass(frozen=True)
class Subject:
    """An estimator with its functions and the options they are checked with."""

    estimator: Estimator
    advantages: Callable[[AdvantageInputs], AdvantageOutputs]
    policy_loss: Callable[[LossInputs], LossTerms]
    options: Section


@dataclass(frozen=True)
class Evaluated:
    """A policy loss and what follows from it."""

    terms: LossTerms
    loss: Tensor
    """The aggregated loss, scalar."""
    grad_BT: Tensor
    """Its gradient with respect to `logp`."""


def subject_of(estimator: Estimator, options: Section | None = None) -> Subject:
    """The estimator ready to be checked, with its default options unless others are given.
    Raises ConfigError: a reference to the math leads nowhere."""
    options = estimator.options() if options is None else options
    return Subject(estimator, estimator.load_advantages(), estimator.load_policy_loss(), options)


def mask_BT() -> Tensor:
    """Trainable tokens `[8, 7]`, bool: ragged rows, two with holes, one of a single token, one of none."""
    mask = torch.arange(max(_LENGTHS)) < torch.tensor(_LENGTHS)[:, None]
    mask[2, 1:4] = False
    mask[5, 0] = False
    mask[UNTRAINED] = False
    return mask


def loss_inputs(subject: Subject) -> LossInputs:
    """A micro-batch in float64: ratios inside and outside the usual clip ranges, advantages of both signs.

    Without a critic all tokens of a sample share its advantage, as group baselines have it.
    """
    generator = torch.Generator().manual_seed(20)
    mask = mask_BT()

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(mask.shape, generator=generator, dtype=torch.float64)

    old_logp = -0.1 - normal(1.0).abs()
    advantages = normal(1.0)
    if not subject.estimator.needs_critic:
        advantages = advantages[:, :1].expand(mask.shape).clone()
    return LossInputs(
        logp=old_logp + normal(0.3),
        old_logp=old_logp,
        advantages=torch.where(mask, advantages, 0.0),
        mask=mask,
        rollout_logp=old_logp + normal(0.02),
        options=subject.options,
    )


def at_ratio_one(inputs: LossInputs) -> LossInputs:
    """The same micro-batch before the first update: new, old and rollout log-probabilities are equal."""
    return replace(inputs, logp=inputs.old_logp, rollout_logp=inputs.old_logp)


def rows_of(record: R, rows: Tensor) -> R:
    """The record with the given rows only."""
    return on_tensors(record, lambda x: x[rows])


def advantage_inputs(subject: Subject, *, with_extras: bool = False) -> AdvantageInputs:
    """A rollout in float32, with values where the estimator has a critic; with extras also a KL penalty in the reward
    and, with a critic, a value after the truncated sample."""
    generator = torch.Generator().manual_seed(21)
    mask = mask_BT()
    values, kl = (torch.randn(mask.shape, generator=generator) for _ in range(2))
    truncated = torch.arange(mask.shape[0]) == 0
    has_critic = subject.estimator.needs_critic
    return AdvantageInputs(
        rewards=torch.tensor(_REWARDS),
        mask=mask,
        group_ids=torch.tensor(_GROUPS),
        options=subject.options,
        values=values if has_critic else None,
        kl=0.01 * kl.abs() if with_extras else None,
        truncated=truncated,
        bootstrap=truncated * 0.7 if with_extras and has_critic else None,
    )


def advantage_cases(subject: Subject) -> list[AdvantageInputs]:
    """The rollout without and with a KL penalty and a bootstrap value."""
    return [advantage_inputs(subject), advantage_inputs(subject, with_extras=True)]


def on_tensors(record: R, change: Callable[[Tensor], Tensor]) -> R:
    """The record with `change` applied to every tensor in it."""
    return replace(record, **{name: change(value) for name, value in tensors_of(record).items()})


def tensors_of(record: R) -> dict[str, Tensor]:
    """The tensors of a record by field name."""
    return {name: value for name, value in vars(record).items() if isinstance(value, Tensor)}


def padded(record: R, columns: int) -> R:
    """The record with masked columns at the end of every per-token tensor."""
    shape = record.mask.shape
    return on_tensors(record, lambda x: torch.nn.functional.pad(x, (0, columns)) if x.shape == shape else x)


def evaluate(
    subject: Subject, inputs: LossInputs, *, mode: Mode = "token", denominator: float | None = None
) -> Evaluated:
    """The policy loss reduced as the trainer does it; the denominator is this micro-batch's own unless given."""
    logp = inputs.logp.detach().clone().requires_grad_()
    terms = subject.policy_loss(replace(inputs, logp=logp))
    if denominator is None:
        denominator = denominator_of(inputs, mode)
    loss = aggregate(terms.loss_per_token, inputs.mask, mode=mode, denominator=denominator)
    # A loss may be a constant where nothing is trainable.
    grad = torch.autograd.grad(loss, logp, allow_unused=True)[0] if loss.requires_grad else None
    return Evaluated(terms, loss.detach(), torch.zeros_like(logp) if grad is None else grad)


def denominator_of(inputs: LossInputs, mode: Mode) -> float:
    """Trainable tokens or samples, at least 1."""
    return float(max(int(inputs.mask.sum()), 1) if mode == "token" else inputs.mask.shape[0])


def gap(got: Tensor, expected: Tensor) -> float:
    """Largest difference relative to max(1, |expected|); inf where shapes or finiteness differ."""
    if got.shape != expected.shape:
        return float("inf")
    if got.numel() == 0:
        return 0.0
    wide = expected.detach().double()
    relative = (got.detach().double() - wide).abs() / wide.abs().clamp(min=1.0)
    return float(torch.where(relative.isnan(), float("inf"), relative).max())


TOLERANCE = 1e-5
"""Where `gap` counts as a difference: above float32 rounding, far below what a wrong formula gives."""
