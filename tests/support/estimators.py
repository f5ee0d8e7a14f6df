"""The built-in estimators in every variant, and their losses once more as scalar float64 arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import relax_cispo
import relax_grpo
import relax_gspo
import relax_ppo
import relax_sapo
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from relax_cli import Estimator, LossInputs, Section
from relax_cli.algorithms.reduce import aggregate

ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator
    for plugin in (relax_ppo, relax_grpo, relax_gspo, relax_cispo, relax_sapo)
    for estimator in plugin.relax_estimators()
}
OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {"lambd": 0.95, "gamma": 0.99},
    "ppo dual-clip": {"lambd": 0.95, "eps_clip_high": 0.3, "eps_clip_c": 1.5},
    "grpo": {},
    "grpo no-std": {"disable_grpo_std_normalization": True, "eps_clip_high": 0.28},
    "gspo": {},
    "cispo": {},
    "cispo by-sign": {"cispo_by_sign": True},
    "sapo": {},
}
every_variant = pytest.mark.parametrize("variant", OPTIONS)
every_mode = pytest.mark.parametrize("mode", ["sample", "token"])
SEEDS = st.integers(0, 2**31 - 1)
# Always the same examples: now and then a random one would lie on a kink, where differences are no derivative.
some = settings(max_examples=25, deadline=None, derandomize=True)
few = settings(some, max_examples=8)
ROWS, LENGTH = 4, 6


@dataclass(frozen=True)
class Variant:
    """An estimator with options."""

    estimator: Estimator
    options: Section

    @classmethod
    def of(cls, name: str, **changes: Any) -> Variant:
        """The variant of that name; `changes` go on top of its options."""
        estimator = ESTIMATORS[name.split()[0]]
        return cls(estimator, estimator.options(**(OPTIONS[name] | changes)))


def random_inputs(seed: int, options: Any, *, spread: float = 0.4, dtype: torch.dtype = torch.float64) -> LossInputs:
    """Four rows, the last one without a trainable token, the masked slots full of NaN."""
    g = torch.Generator().manual_seed(seed)
    mask_BT = torch.rand(ROWS, LENGTH, generator=g) < 0.7
    mask_BT[-1] = False
    logp_BT = -torch.rand(ROWS, LENGTH, generator=g) - 0.5
    old_BT = logp_BT + spread * torch.randn(ROWS, LENGTH, generator=g)
    advantages_BT = torch.randn(ROWS, LENGTH, generator=g)
    soiled = [torch.where(mask_BT, x, math.nan).to(dtype) for x in (logp_BT, old_BT, advantages_BT)]
    return LossInputs(soiled[0].requires_grad_(), soiled[1], soiled[2], mask_BT, options=options)


def scalar_loss(variant: Variant, inputs: LossInputs, mode: Any) -> Tensor:
    terms = variant.estimator.load_policy_loss()(inputs)
    denominator = float(ROWS if mode == "sample" else inputs.mask.sum())
    return aggregate(terms.loss_per_token, inputs.mask, mode=mode, denominator=denominator)


def row_loss(name: str, options: Any, diffs: Sequence[float], logps: Sequence[float], advs: Sequence[float]) -> float:
    """Sum of the losses of one sample's trainable tokens, from the papers; `diffs` are `logp − old_logp`."""
    estimator = name.split()[0]
    if estimator == "gspo":
        diffs = [math.fsum(diffs) / len(diffs)] * len(diffs) if diffs else diffs
    terms: dict[str, Callable[[Any, float, float, float], float]] = {"cispo": _cispo, "sapo": _sapo}
    term = terms.get(estimator, _ppo)
    return math.fsum(term(options, math.exp(d), x, a) for d, x, a in zip(diffs, logps, advs, strict=True))


def _ppo(options: Any, ratio: float, logp: float, advantage: float) -> float:
    clipped = min(max(ratio, 1 - options.eps_clip), 1 + (options.eps_clip_high or options.eps_clip))
    objective = min(ratio * advantage, clipped * advantage)
    if options.eps_clip_c is not None and advantage < 0:
        objective = max(objective, options.eps_clip_c * advantage)
    return -objective


def _cispo(options: Any, ratio: float, logp: float, advantage: float) -> float:
    high, low = 1 + (options.eps_clip_high or options.eps_clip), 1 - options.eps_clip
    if options.cispo_by_sign:
        weight = min(ratio, high) if advantage >= 0 else max(ratio, low)
    else:
        weight = min(max(ratio, low), high)
    return -weight * advantage * logp


def _sapo(options: Any, ratio: float, logp: float, advantage: float) -> float:
    tau = options.sapo_tau_pos if advantage > 0 else options.sapo_tau_neg
    return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
