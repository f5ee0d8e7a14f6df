"""Advantages: a CPU-only service that turns rewards and values of a whole rollout into advantages and returns."""

from __future__ import annotations

from relax_cli.config.schema import AlgorithmSection, Section
from relax_cli.plugin.graph import RoleSpec
from relax_cli.plugin.records import Estimator
from relax_cli.roles.advantage_inputs import FIELDS, advantage_inputs, finished_advantages, kl_penalty
from relax_cli.roles.batching import unpad
from relax_cli.roles.protocols import SampleQueue


class AdvantagesRole:
    """Sees every row, so that whitening is over the whole rollout."""

    name = "advantages"

    def __init__(
        self,
        queue: SampleQueue,
        samples_per_rollout: int,
        algorithm: AlgorithmSection,
        estimator: Estimator,
        estimator_options: Section,
        spec: RoleSpec,
    ) -> None:
        self.queue = queue
        self.samples_per_rollout = samples_per_rollout
        self.algorithm = algorithm
        self.advantages = estimator.load_advantages()
        self.estimator_options = estimator_options
        self.fields = list(dict.fromkeys([*FIELDS, *spec.reads]))

    def compute(self, rollout_id: int) -> dict[str, float]:
        """Read rewards and values, write `advantages` and `returns`; metrics are from before whitening."""
        rows = list(range(self.samples_per_rollout))
        fields = self.queue.get(rollout_id, rows, self.fields)
        columns = {name: dict(zip(rows, values, strict=True)) for name, values in fields.items()}
        if self.algorithm.kl_coef:
            columns["kl"] = kl_penalty(columns, rows, self.algorithm.kl_coef, old="rollout_log_probs")
        inputs = advantage_inputs(columns, rows, self.estimator_options)
        outputs = self.advantages(inputs)
        assert outputs.returns is not None, "an estimator with a critic gives returns"
        advantages, metrics = finished_advantages(
            outputs.advantages, inputs, normalize=self.algorithm.normalize_advantages
        )
        by_row = {
            "advantages": unpad(advantages, rows, columns["response_lens"]),
            "returns": unpad(outputs.returns, rows, columns["response_lens"]),
        }
        self.queue.put(rollout_id, rows, {name: [values[row] for row in rows] for name, values in by_row.items()})
        return metrics
