"""Advantages: a CPU-only service that turns rewards and values of a whole rollout into advantages and returns.

Critic and Actor read the same queue fields and call the same functions; a row's result does not depend on the other
rows of the call beyond its group, so their numbers are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from relax_cli.algorithms.gae import whiten
from relax_cli.algorithms.kl import kl_estimate
from relax_cli.algorithms.types import AdvantageInputs
from relax_cli.config.schema import Section
from relax_cli.plugin.graph import TOKEN_REWARDS
from relax_cli.plugin.records import EstimatorMath
from relax_cli.roles.batching import Columns, read_columns, stack, unpad, write_columns
from relax_cli.roles.context import RoleContext

FIELDS = ("response_lens", "response_mask", "rewards", "group_ids", "truncated")
"""Queue fields of every estimator. `token_rewards`, `values`, `bootstrap_values` and `kl` are used where they exist."""


def advantage_inputs(columns: Columns, rows: Sequence[int], options: Section) -> AdvantageInputs:
    """The given rows of `FIELDS` and of what else there is, padded to the longest response."""
    width = max(columns["response_mask"][row].numel() for row in rows)

    def optional(name: str) -> Tensor | None:
        return stack(columns, name, rows, width) if name in columns else None

    return AdvantageInputs(
        rewards=stack(columns, "rewards", rows, width),
        mask=stack(columns, "response_mask", rows, width) != 0,
        group_ids=stack(columns, "group_ids", rows, width),
        options=options,
        token_rewards=optional(TOKEN_REWARDS),
        values=optional("values"),
        kl=optional("kl"),
        truncated=stack(columns, "truncated", rows, width) != 0,
        bootstrap=optional("bootstrap_values"),
    )


def kl_penalty(columns: Columns, rows: Sequence[int], coef: float, old: str) -> dict[int, Tensor]:
    """`coef · (old − ref)` of each response token (k1): what `--kl-coef` takes off the reward. The samples were drawn
    with the log-probabilities in the column `old`."""
    ref = columns["ref_log_probs"]
    return {row: coef * kl_estimate(columns[old][row], ref[row], "k1") for row in rows}


def finished_advantages(
    advantages_BT: Tensor, inputs: AdvantageInputs, *, normalize: bool
) -> tuple[Tensor, dict[str, float]]:
    """Advantages of a whole rollout, whitened on request, and metrics from before that.

    Every row of the rollout is here, so the statistics are those of all data-parallel ranks.
    """
    raw = advantages_BT[inputs.mask]
    metrics = {
        "advantages/mean": float(raw.mean()) if raw.numel() else 0.0,
        "advantages/std": float(torch.std(raw)) if raw.numel() > 1 else 0.0,
    }
    if inputs.kl is not None:
        penalty = inputs.kl[inputs.mask]
        metrics["kl_penalty"] = float(penalty.mean()) if penalty.numel() else 0.0
    return (whiten(advantages_BT, inputs.mask) if normalize else advantages_BT), metrics


class AdvantagesRole:
    """Sees every row, so that whitening is over the whole rollout."""

    def __init__(self, context: RoleContext) -> None:
        self.queue, self.config, self.options = context.queue, context.config, context.options
        self.advantages = EstimatorMath(context.estimator).advantages
        self.fields = list(dict.fromkeys([*FIELDS, *context.spec.reads]))

    def compute(self, rollout_id: int) -> dict[str, float]:
        """Read rewards and values, write `advantages` and `returns`; metrics are from before whitening."""
        algorithm, rows = self.config.algorithm, list(range(self.config.batch.samples_per_rollout))
        columns = read_columns(self.queue, rollout_id, rows, self.fields)
        if algorithm.kl_coef:
            columns["kl"] = kl_penalty(columns, rows, algorithm.kl_coef, old="rollout_log_probs")
        inputs = advantage_inputs(columns, rows, self.options)
        outputs = self.advantages(inputs)
        assert outputs.returns is not None, "checked by EstimatorMath"
        normalize = algorithm.normalize_advantages
        advantages, metrics = finished_advantages(outputs.advantages, inputs, normalize=normalize)
        found = {"advantages": advantages, "returns": outputs.returns}
        by_row = {name: unpad(values, rows, columns["response_lens"]) for name, values in found.items()}
        write_columns(self.queue, rollout_id, by_row)
        return metrics
