"""Actor: the policy. Takes the estimator's policy step and hands out its weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from relax_cli.algorithms.reduce import Mode, aggregate
from relax_cli.algorithms.surrogate import tis_weight
from relax_cli.algorithms.types import AdvantageInputs, LossInputs
from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.trainer import MicroBatch, ModelOutput, TrainableModel
from relax_cli.config.schema import AlgorithmSection, BatchSection, Section
from relax_cli.plugin.records import Estimator
from relax_cli.roles.batching import unpad
from relax_cli.roles.protocols import SampleQueue
from relax_cli.roles.training import (
    RolloutShare,
    TrainingRole,
    masked_token_mean,
    mean_over_steps,
    trainable,
)


class ActorRole(TrainingRole):
    """One rank of the policy."""

    name = "actor"

    def __init__(
        self,
        model: TrainableModel,
        queue: SampleQueue,
        batch: BatchSection,
        algorithm: AlgorithmSection,
        estimator: Estimator,
        estimator_options: Section,
        *,
        advantages_from_queue: bool,
        save_dir: Path | None,
    ) -> None:
        super().__init__(model, queue, batch, save_dir)
        self.algorithm = algorithm
        self.policy_loss = estimator.load_policy_loss()
        self.group_advantages = estimator.load_advantages()
        self.estimator_options = estimator_options
        self.advantages_from_queue = advantages_from_queue

    def train(self, rollout_id: int) -> dict[str, float]:
        """The policy steps of this rollout."""
        names = ("advantages",) if self.advantages_from_queue else ("rewards",)
        share = self.fetch_share(rollout_id, ("rollout_log_probs", *names))
        if not self.advantages_from_queue:
            self._advantages_without_critic(rollout_id, share)
        self._set_old_log_probs(share)
        gaps = LogProbGap()
        records = [self._update(share, step, gaps if step == 0 else None) for step in range(len(share.step_rows))]
        return mean_over_steps(records) | gaps.metrics()

    def export_weights(self) -> dict[str, Tensor] | None:
        """All parameters under their Hugging Face names on the first rank, None on the others."""
        return self.model.hf_state()

    def _set_old_log_probs(self, share: RolloutShare) -> None:
        """Adds `old_log_probs`: the rollout engine's, or the actor's own from before the update."""
        if self.algorithm.use_rollout_logprobs:
            share.columns["old_log_probs"] = share.columns["rollout_log_probs"]
            return
        old: dict[int, Tensor] = {}
        for rows, output in self.forward(share):
            old |= unpad(output.log_probs_BT, rows, share.columns["response_lens"])
        share.columns["old_log_probs"] = old

    def _advantages_without_critic(self, rollout_id: int, share: RolloutShare) -> None:
        """Adds `advantages` from the rewards of all rows: a group's samples may lie on several ranks."""
        every_row = range(self.batch.samples_per_rollout)
        facts = self.queue.get(rollout_id, every_row, ["rewards", "group_ids", "response_mask"])
        has_tokens = torch.stack([mask.any() for mask in facts["response_mask"]])
        outputs = self.group_advantages(
            AdvantageInputs(
                rewards=torch.stack(facts["rewards"]),
                mask=has_tokens[:, None],
                group_ids=torch.stack(facts["group_ids"]),
                options=self.estimator_options,
            )
        )
        masks = share.columns["response_mask"]
        share.columns["advantages"] = {
            row: torch.where(masks[row] != 0, outputs.advantages[row, 0], 0.0) for row in share.rows
        }

    def _update(self, share: RolloutShare, step: int, gaps: LogProbGap | None) -> dict[str, float]:
        config = self.algorithm
        per_token = config.calculate_per_token_loss
        denominator = self.loss_denominator(share, step, per_token)
        mode: Mode = "token" if per_token else "sample"

        def loss_fn(output: ModelOutput, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            mask = trainable(batch)
            rollout_logp = batch.fields["rollout_log_probs"]
            if gaps is not None:
                gaps.add(output.log_probs_BT, rollout_logp, mask)
            terms = self.policy_loss(
                LossInputs(
                    logp=output.log_probs_BT,
                    old_logp=batch.fields["old_log_probs"],
                    advantages=batch.fields["advantages"],
                    mask=mask,
                    rollout_logp=rollout_logp,
                    options=self.estimator_options,
                )
            )
            loss_BT = terms.loss_per_token
            if config.use_tis:
                weight_BT = tis_weight(
                    batch.fields["old_log_probs"], rollout_logp, low=config.tis_clip_low, high=config.tis_clip
                )
                loss_BT = torch.where(mask, loss_BT * torch.where(mask, weight_BT, 1.0), 0.0)
            pg_loss = aggregate(loss_BT, mask, mode=mode, denominator=denominator)
            loss = pg_loss
            if config.entropy_coef:
                entropy = aggregate(output.entropy_BT, mask, mode=mode, denominator=denominator)
                loss = loss - config.entropy_coef * entropy
            watched = {**terms.metrics, "entropy": output.entropy_BT}
            metrics = {
                METRIC_NAMES.get(name, name): masked_token_mean(value, mask, share.step_tokens[step])
                for name, value in watched.items()
            }
            return loss, {"pg_loss": pg_loss.detach(), **metrics}

        names: Sequence[str] = ("rollout_log_probs", "old_log_probs", "advantages")
        batches = self.micro_batches(share, step, names)
        result = self.model.train_step(batches, loss_fn, need_entropy_grad=config.entropy_coef > 0)
        return result.metrics | {
            "actor/grad_norm": result.grad_norm,
            "actor/lr": result.lr,
            "actor/skipped_steps": float(result.skipped),
        }


METRIC_NAMES = {"clip_frac": "pg_clip_frac"}
"""Names the trackers know for what a policy loss reports."""


class LogProbGap:
    """|trainer − rollout engine| of the same tokens' log-probabilities, before the first update of a rollout."""

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0
        self.largest = 0.0

    def add(self, logp_BT: Tensor, rollout_logp_BT: Tensor, mask_BT: Tensor) -> None:
        """Count the trainable tokens of one micro-batch."""
        gap = (logp_BT.detach() - rollout_logp_BT).abs()[mask_BT]
        if gap.numel():
            self.total += float(gap.sum())
            self.count += gap.numel()
            self.largest = max(self.largest, float(gap.max()))

    def metrics(self) -> dict[str, float]:
        """Mean and maximum over all data-parallel ranks."""
        total, count = parallel.sum_over_data_parallel([self.total, float(self.count)])
        return {
            "train_rollout_logprob_diff/mean": total / max(count, 1.0),
            "train_rollout_logprob_diff/max": parallel.max_over_data_parallel(self.largest),
        }
