"""Advantages: a CPU-only service that turns rewards and values of a whole rollout into advantages and returns."""

from __future__ import annotations

from relax_cli.plugin.guarded import EstimatorMath
from relax_cli.roles.advantage_inputs import FIELDS, advantage_inputs, finished_advantages, kl_penalty
from relax_cli.roles.batching import unpad
from relax_cli.roles.context import RoleContext


class AdvantagesRole:
    """Sees every row, so that whitening is over the whole rollout."""

    name = "advantages"

    def __init__(self, context: RoleContext) -> None:
        self.queue = context.queue
        self.samples_per_rollout = context.config.batch.samples_per_rollout
        self.algorithm = context.config.algorithm
        self.options = context.options
        self.advantages = EstimatorMath(context.estimator).advantages
        self.fields = list(dict.fromkeys([*FIELDS, *context.spec.reads]))

    def compute(self, rollout_id: int) -> dict[str, float]:
        """Read rewards and values, write `advantages` and `returns`; metrics are from before whitening."""
        rows = list(range(self.samples_per_rollout))
        fields = self.queue.get(rollout_id, rows, self.fields)
        columns = {name: dict(zip(rows, values, strict=True)) for name, values in fields.items()}
        if self.algorithm.kl_coef:
            columns["kl"] = kl_penalty(columns, rows, self.algorithm.kl_coef, old="rollout_log_probs")
        inputs = advantage_inputs(columns, rows, self.options)
        outputs = self.advantages(inputs)
        assert outputs.returns is not None, "checked by EstimatorMath"
        advantages, metrics = finished_advantages(
            outputs.advantages, inputs, normalize=self.algorithm.normalize_advantages
        )
        by_row = {
            "advantages": unpad(advantages, rows, columns["response_lens"]),
            "returns": unpad(outputs.returns, rows, columns["response_lens"]),
        }
        self.queue.put(rollout_id, rows, {name: [values[row] for row in rows] for name, values in by_row.items()})
        return metrics
