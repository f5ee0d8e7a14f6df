"""Critic: predicts token values, derives its own returns, takes the clipped-value step (PPO, arXiv:1707.06347)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from relax_cli.algorithms.reduce import aggregate
from relax_cli.algorithms.value_loss import clipped_value_loss
from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.trainer import MicroBatch, ModelOutput, TrainableModel
from relax_cli.plugin.records import EstimatorMath
from relax_cli.roles.advantages import FIELDS, advantage_inputs, kl_penalty
from relax_cli.roles.batching import Columns, unpad
from relax_cli.roles.context import RoleContext
from relax_cli.roles.training import RolloutShare, TrainingRole, masked_token_mean, trainable


class CriticRole(TrainingRole):
    """One rank of the value model."""

    name = "critic"

    def __init__(self, model: TrainableModel, context: RoleContext) -> None:
        self.critic = context.config.critic
        super().__init__(model, context, save_dir=self.critic.critic_save)
        self.advantages = EstimatorMath(context.estimator).advantages
        self.spec = context.spec
        self.share: RolloutShare | None = None

    def predict(self, rollout_id: int) -> dict[str, float]:
        """Values to the queue, and returns by the very function that the Advantages service applies to all rows."""
        self.share = share = self.fetch_share(rollout_id, (*FIELDS, *self.spec.reads))
        columns, rows, bootstrap = share.columns, share.rows, "bootstrap_values" in self.spec.writes
        seen = replace(share, columns=with_end_state(columns)) if bootstrap else share
        values = self.answers(seen, lambda output: output.values_BT)
        if bootstrap:
            columns["bootstrap_values"] = {
                row: torch.where(columns["truncated"][row] != 0, values[row][-1], 0.0) for row in rows
            }
            values = {row: values[row][:-1].clone() for row in rows}
        columns["values"], columns["returns"] = values, {}
        self.write(share, {name: columns[name] for name in self.spec.writes})
        if rows:
            if self.algorithm.kl_coef:
                columns["kl"] = kl_penalty(columns, rows, self.algorithm.kl_coef, old="rollout_log_probs")
            outputs = self.advantages(advantage_inputs(columns, rows, self.options))
            assert outputs.returns is not None, "an estimator with a critic gives returns"
            columns["returns"] = unpad(outputs.returns, rows, columns["response_lens"])
        return explained_variance(share)

    def update(self) -> dict[str, float]:
        """The value steps of the rollout that `predict` was called for.
        Raises RunError: a gradient was not finite, and `--on-nan-grad` is `stop`."""
        assert self.share is not None, "predict comes first"
        share, self.share = self.share, None
        head = self.model.value_head()
        metrics = self.learn(share, lambda step: self._update(share, step), passes=self.critic.critic_updates_per_step)
        return metrics | {"critic/value_head_moved": float((self.model.value_head() - head).abs().max())}

    def _update(self, share: RolloutShare, step: int) -> dict[str, float]:
        mode, denominator = self.mode, self.loss_denominator(share, step)

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

        return self.take_step(share, step, ("values", "returns"), loss_fn)


def with_end_state(columns: Columns) -> Columns:
    """The columns with one more response token, so that the model also answers for the state after the last one.

    The added id is never looked at: a value belongs to the state *before* its token.
    """
    return {
        **columns,
        "tokens": {row: torch.cat([ids, ids.new_zeros(1)]) for row, ids in columns["tokens"].items()},
        "response_lens": {row: length + 1 for row, length in columns["response_lens"].items()},
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
    n, return_sum, return_square, error_sum, error_square = parallel.all_reduce(sums.tolist())
    n = max(n, 1.0)
    return_var, error_var = return_square / n - (return_sum / n) ** 2, error_square / n - (error_sum / n) ** 2
    return {
        "explained_variance": 1 - error_var / return_var if return_var > 1e-12 else 0.0,
        "values/mean": (return_sum - error_sum) / n,
        "returns/mean": return_sum / n,
    }
