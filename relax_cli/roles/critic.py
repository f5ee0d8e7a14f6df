"""Critic: predicts token values, derives its own returns, takes the clipped-value step (PPO, arXiv:1707.06347)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from relax_cli.algorithms.reduce import Mode, aggregate
from relax_cli.algorithms.types import AdvantageInputs
from relax_cli.algorithms.value_loss import clipped_value_loss
from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.trainer import MicroBatch, ModelOutput, TrainableModel
from relax_cli.config.schema import BatchSection, CriticSection, Section
from relax_cli.plugin.records import Estimator
from relax_cli.roles.batching import stack, unpad
from relax_cli.roles.protocols import SampleQueue
from relax_cli.roles.training import (
    RolloutShare,
    TrainingRole,
    masked_token_mean,
    mean_over_steps,
    trainable,
)


class CriticRole(TrainingRole):
    """One rank of the value model."""

    name = "critic"

    def __init__(
        self,
        model: TrainableModel,
        queue: SampleQueue,
        batch: BatchSection,
        critic: CriticSection,
        estimator: Estimator,
        estimator_options: Section,
        *,
        per_token_loss: bool,
        save_dir: Path | None,
    ) -> None:
        super().__init__(model, queue, batch, save_dir)
        self.critic = critic
        self.advantages = estimator.load_advantages()
        self.estimator_options = estimator_options
        self.per_token_loss = per_token_loss
        self.share: RolloutShare | None = None

    def predict(self, rollout_id: int) -> dict[str, float]:
        """Values to the queue, and local returns."""
        share = self.fetch_share(rollout_id, ("rewards", "group_ids", "truncated"))
        self._predict_values(share)
        if share.rows and parallel.is_output_rank():
            self.queue.put(rollout_id, share.rows, {"values": [share.columns["values"][row] for row in share.rows]})
        self._compute_returns(share)
        self.share = share
        return explained_variance(share)

    def update(self) -> dict[str, float]:
        """The value steps of the rollout that `predict` was called for."""
        assert self.share is not None, "predict comes first"
        share, self.share = self.share, None
        return mean_over_steps([self._update(share, step) for step in range(len(share.step_rows))])

    def _predict_values(self, share: RolloutShare) -> None:
        """Adds the column `values`."""
        values: dict[int, Tensor] = {}
        for rows, output in self.forward(share):
            values |= unpad(output.values_BT, rows, share.columns["response_lens"])
        share.columns["values"] = values

    def _compute_returns(self, share: RolloutShare) -> None:
        """Adds the column `returns`, by the very function the Advantages service applies to all rows."""
        columns, rows = share.columns, share.rows
        columns["returns"] = {}
        if not rows:
            return
        width = max(columns["values"][row].numel() for row in rows)
        outputs = self.advantages(
            AdvantageInputs(
                rewards=stack(columns, "rewards", rows, width),
                mask=stack(columns, "response_mask", rows, width) != 0,
                group_ids=stack(columns, "group_ids", rows, width),
                options=self.estimator_options,
                values=stack(columns, "values", rows, width),
                truncated=stack(columns, "truncated", rows, width) != 0,
            )
        )
        assert outputs.returns is not None, "an estimator with a critic gives returns"
        columns["returns"] = unpad(outputs.returns, rows, columns["response_lens"])

    def _update(self, share: RolloutShare, step: int) -> dict[str, float]:
        denominator = self.loss_denominator(share, step, self.per_token_loss)
        mode: Mode = "token" if self.per_token_loss else "sample"

        def loss_fn(output: ModelOutput, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            mask = trainable(batch)
            terms = clipped_value_loss(
                output.values_BT,
                batch.fields["values"],
                batch.fields["returns"],
                value_clip=self.critic.value_clip,
                mask=mask,
            )
            loss = aggregate(terms.loss_per_token, mask, mode=mode, denominator=denominator)
            metrics = {
                name: masked_token_mean(value, mask, share.step_tokens[step]) for name, value in terms.metrics.items()
            }
            return loss, {"value_loss": loss.detach(), **metrics}

        result = self.model.train_step(self.micro_batches(share, step, ("values", "returns")), loss_fn)
        return result.metrics | {
            "critic/grad_norm": result.grad_norm,
            "critic/lr": result.lr,
            "critic/skipped_steps": float(result.skipped),
        }


def explained_variance(share: RolloutShare) -> dict[str, float]:
    """`1 − Var(R − V) / Var(R)` over trainable tokens of all ranks, with the values from before the update."""
    sums = torch.zeros(5, dtype=torch.float64)
    for row in share.rows:
        keep = share.columns["response_mask"][row] != 0
        returns = share.columns["returns"][row][keep].double()
        errors = returns - share.columns["values"][row][keep].double()
        sums += torch.stack(
            [keep.sum().double(), returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum()]
        )
    n, return_sum, return_square, error_sum, error_square = parallel.sum_over_data_parallel(sums.tolist())
    n = max(n, 1.0)
    return_var, error_var = return_square / n - (return_sum / n) ** 2, error_square / n - (error_sum / n) ** 2
    return {
        "explained_variance": 1 - error_var / return_var if return_var > 1e-12 else 0.0,
        "values/mean": (return_sum - error_sum) / n,
        "returns/mean": return_sum / n,
    }
