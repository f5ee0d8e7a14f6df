"""Advantages: a CPU-only service that turns rewards and values of a whole rollout into advantages and returns."""

from __future__ import annotations

import torch

from relax_cli.algorithms.gae import whiten
from relax_cli.algorithms.types import AdvantageInputs
from relax_cli.config.schema import Section
from relax_cli.plugin.records import Estimator
from relax_cli.roles.batching import stack, unpad
from relax_cli.roles.protocols import SampleQueue


class AdvantagesRole:
    """Sees every row, so that whitening is over the whole rollout."""

    name = "advantages"

    def __init__(
        self,
        queue: SampleQueue,
        samples_per_rollout: int,
        estimator: Estimator,
        estimator_options: Section,
        *,
        normalize_advantages: bool,
    ) -> None:
        self.queue = queue
        self.samples_per_rollout = samples_per_rollout
        self.advantages = estimator.load_advantages()
        self.estimator_options = estimator_options
        self.normalize_advantages = normalize_advantages

    def compute(self, rollout_id: int) -> dict[str, float]:
        """Read rewards and values, write `advantages` and `returns`; metrics are from before whitening."""
        rows = list(range(self.samples_per_rollout))
        names = ["response_lens", "response_mask", "rewards", "group_ids", "truncated", "values"]
        fields = self.queue.get(rollout_id, rows, names)
        columns = {name: dict(zip(rows, values, strict=True)) for name, values in fields.items()}
        width = max(values.numel() for values in fields["values"])
        mask = stack(columns, "response_mask", rows, width) != 0
        outputs = self.advantages(
            AdvantageInputs(
                rewards=stack(columns, "rewards", rows, width),
                mask=mask,
                group_ids=stack(columns, "group_ids", rows, width),
                options=self.estimator_options,
                values=stack(columns, "values", rows, width),
                truncated=stack(columns, "truncated", rows, width) != 0,
            )
        )
        assert outputs.returns is not None, "an estimator with a critic gives returns"
        advantages = outputs.advantages
        raw = advantages[mask]
        if self.normalize_advantages:
            advantages = whiten(advantages, mask)
        by_row = {
            "advantages": unpad(advantages, rows, columns["response_lens"]),
            "returns": unpad(outputs.returns, rows, columns["response_lens"]),
        }
        self.queue.put(rollout_id, rows, {name: [values[row] for row in rows] for name, values in by_row.items()})
        if raw.numel() < 2:
            return {"advantages/mean": float(raw.sum()), "advantages/std": 0.0}
        return {"advantages/mean": float(raw.mean()), "advantages/std": float(torch.std(raw))}
