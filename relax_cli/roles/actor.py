"""Actor: the policy. Takes the estimator's policy step and hands out its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from relax_cli.algorithms.kl import kl_estimate
from relax_cli.algorithms.masking import select
from relax_cli.algorithms.reduce import aggregate
from relax_cli.algorithms.surrogate import tis_weight
from relax_cli.algorithms.types import LossInputs
from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.trainer import MicroBatch, ModelOutput, TrainableModel
from relax_cli.backends.rollout.protocol import OpenSender, WeightSender
from relax_cli.backends.rollout.targets import WeightTarget
from relax_cli.checkpoint.store import gather
from relax_cli.config.schema import AlgorithmSection, Section
from relax_cli.errors import RunError, problem_kind
from relax_cli.plugin.graph import ROUTES, TOKEN_REWARDS, WEIGHT_VERSIONS
from relax_cli.plugin.records import EstimatorMath
from relax_cli.roles.advantages import FIELDS, advantage_inputs, finished_advantages, kl_penalty
from relax_cli.roles.batching import read_columns, unpad
from relax_cli.roles.context import RoleContext
from relax_cli.roles.training import RolloutShare, TrainingRole, masked_token_mean, trainable


class ActorRole(TrainingRole):
    """One rank of the policy."""

    name = "actor"

    def __init__(self, model: TrainableModel, context: RoleContext, open_sender: OpenSender) -> None:
        super().__init__(model, context, save_dir=context.config.checkpoint.save)
        self.math = EstimatorMath(context.estimator)
        self.own_advantages = self.math.advantages if "advantages" in context.spec.writes else None
        self.judged = [*FIELDS, *(name for name in context.spec.reads if name == TOKEN_REWARDS)]
        self.versions = [name for name in context.spec.reads if name == WEIGHT_VERSIONS]
        self.routes = [name for name in context.spec.reads if name == ROUTES]
        self.open_sender = open_sender
        self.sender: WeightSender | None = None
        self.begun: RolloutShare | None = None

    def begin(self, rollout_id: int) -> None:
        """What `train` can do before there are advantages: read the samples, and the first forward pass."""
        self.begun = self._share(rollout_id, ())
        _, batches = self.micro_batches(self.begun, self.begun.step_rows[0], ())
        if batches:
            self.model.begin(batches[0], need_entropy_grad=self.algorithm.entropy_coef > 0)

    def train(self, rollout_id: int) -> dict[str, float]:
        """The policy steps of this rollout.
        Raises RunError: a gradient was not finite, and `--on-nan-grad` is `stop`; or see `check_gap`."""
        missing = ["advantages"] if self.own_advantages is None else []
        share, self.begun = self.begun or self._share(rollout_id, missing), None
        assert share.rollout_id == rollout_id, "what is begun is trained"
        self.add_fields(share, [name for name in missing if name not in share.columns])
        metrics = self._advantages_without_critic(share) if self.own_advantages is not None else {}
        gaps = LogProbGap()
        metrics |= self.learn(share, lambda step: self._update(share, step, gaps if step == 0 else None))
        measured = gaps.metrics()
        check_gap(measured["train_rollout_logprob_diff/mean"], rollout_id)
        return metrics | measured

    def export_weights(self) -> dict[str, Tensor] | None:
        """All parameters under their Hugging Face names on the first rank, None on the others."""
        return self.model.hf_state()

    def send_weights(self, targets: Sequence[WeightTarget], version: int) -> None:
        """Bring all parameters to rollout servers, the same ones every time, as their weights of `version`.
        Raises RunError: a server did not take them; names it and how far it got."""
        assert self.awake, "weights are on the device only while the actor is awake"
        if self.sender is None:
            self.sender = self.open_sender(targets, self.model.device)
        assert self.sender.targets == tuple(targets), "servers do not change during a run"
        self.sender.send(self.model.hf_buckets, version)

    def _share(self, rollout_id: int, more: Sequence[str]) -> RolloutShare:
        names = ["rollout_log_probs", *self.versions, *self.routes, *more]
        if self.algorithm.needs_reference:
            names.append("ref_log_probs")
        share = self.fetch_share(rollout_id, names)
        if self.algorithm.use_rollout_logprobs:
            share.columns["old_log_probs"] = share.columns["rollout_log_probs"]
        else:
            # Those of the actor itself, from before the update.
            old = self.answers(share, lambda output: output.log_probs_BT)
            share.columns["old_log_probs"] = old
            self.write(share, {"old_log_probs": {row: old[row] for row in old if row < self.dumped}})
        return share

    def _advantages_without_critic(self, share: RolloutShare) -> dict[str, float]:
        """Adds `advantages`, also to the queue. Computed from all rows on every rank: groups lie across ranks, and
        whitening needs every token of the rollout."""
        assert self.own_advantages is not None
        every_row = list(range(self.batch.samples_per_rollout))
        columns = read_columns(self.queue, share.rollout_id, every_row, self.judged)
        if self.algorithm.kl_coef:
            own = kl_penalty(share.columns, share.rows, self.algorithm.kl_coef, old="old_log_probs")
            columns["kl"] = {row: kl for rank in gather(own, parallel.DATA.group) for row, kl in rank.items()}
        inputs = advantage_inputs(columns, every_row, self.options)
        advantages, metrics = finished_advantages(
            self.own_advantages(inputs).advantages, inputs, normalize=self.algorithm.normalize_advantages
        )
        by_row = unpad(advantages, every_row, columns["response_lens"])
        share.columns["advantages"] = {row: by_row[row] for row in share.rows}
        self.write(share, {"advantages": share.columns["advantages"]})
        return metrics

    def _update(self, share: RolloutShare, step: int, gaps: LogProbGap | None) -> dict[str, float]:
        config = self.algorithm
        mode, denominator = self.mode, self.loss_denominator(share, step)

        def loss_fn(output: ModelOutput, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            mask = trainable(batch)
            if gaps is not None:
                # Tokens of earlier weights have other log-probabilities by now.
                newest = mask if not self.versions else mask & (batch.fields[WEIGHT_VERSIONS] == share.rollout_id)
                gaps.add(output.log_probs_BT, batch.fields["rollout_log_probs"], newest)
            loss_BT, watched = policy_loss_per_token(
                self.math, self.options, config, output.log_probs_BT, batch.fields, mask
            )
            watched["entropy"] = output.entropy_BT
            loss = pg_loss = aggregate(loss_BT, mask, mode=mode, denominator=denominator)
            losses = {"pg_loss": pg_loss.detach()}
            if config.entropy_coef:
                entropy = aggregate(output.entropy_BT, mask, mode=mode, denominator=denominator)
                loss = loss - config.entropy_coef * entropy
            if config.use_kl_loss:
                ref_BT = select(batch.fields["ref_log_probs"], mask)
                kl_BT = kl_estimate(select(output.log_probs_BT, mask), ref_BT, config.kl_loss_type)
                kl_loss = aggregate(kl_BT, mask, mode=mode, denominator=denominator)
                loss = loss + config.kl_loss_coef * kl_loss
                losses["kl_loss"] = kl_loss.detach()
            means = {
                METRIC_NAMES.get(name, name): masked_token_mean(value, mask, share.step_tokens[step])
                for name, value in watched.items()
            }
            return loss, losses | means

        fields = ["rollout_log_probs", "old_log_probs", "advantages", *self.versions]
        if config.use_kl_loss:
            fields.append("ref_log_probs")
        metrics = self.take_step(share, step, fields, loss_fn, entropy_grad=config.entropy_coef > 0)
        mismatch = metrics.pop("actor/router_mismatch", None)
        if gaps is not None:
            gaps.router_mismatch = mismatch
        return metrics


def policy_loss_per_token(
    math: EstimatorMath,
    options: Section,
    config: AlgorithmSection,
    logp_BT: Tensor,
    fields: Mapping[str, Tensor],
    mask_BT: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The estimator's loss `[B, T]`, weighted for truncated importance sampling, and what is worth watching."""
    old_BT, rollout_BT = fields["old_log_probs"], fields["rollout_log_probs"]
    terms = math.policy_loss(
        LossInputs(
            logp=logp_BT,
            old_logp=old_BT,
            advantages=fields["advantages"],
            mask=mask_BT,
            rollout_logp=rollout_BT,
            options=options,
        )
    )
    if not config.use_tis:
        return terms.loss_per_token, {**terms.metrics}
    old_BT, rollout_BT = select(old_BT, mask_BT), select(rollout_BT, mask_BT)
    weight_BT = tis_weight(old_BT, rollout_BT, low=config.tis_clip_low, high=config.tis_clip)
    return terms.loss_per_token * weight_BT, {**terms.metrics, "tis_weight": weight_BT}


METRIC_NAMES = {"clip_frac": "pg_clip_frac"}
"""Names the trackers know for what a policy loss reports."""

MOST_GAP = 1.0
"""Mean gap in nats: rounding of bfloat16 stays below a tenth of it, an engine with other weights is above it."""

LOGPROB_GAP = problem_kind(
    "logprob-gap",
    "During a run",
    "Trainer and rollout engine disagree about the log-probabilities of the same tokens by more than 1 nat on average: "
    "the engine samples from other weights or another model than the one that is trained.",
)


def check_gap(mean: float, rollout_id: int) -> None:
    """Raises RunError: the engine's log-probabilities and the trainer's cannot be those of one model."""
    if mean > MOST_GAP:
        raise RunError(
            LOGPROB_GAP(
                "the rollout engine samples from another model than the one that is trained",
                where=f"step {rollout_id + 1}, train_rollout_logprob_diff/mean",
                got=f"{mean:.3g} nats",
                expected=f"at most {MOST_GAP:g}",
                fix="start external servers with the folder of --hf-checkpoint as --model-path, and let nothing else "
                "update their weights",
            )
        )


@dataclass
class LogProbGap:
    """|trainer − rollout engine| of the same tokens' log-probabilities before the first update of a rollout, and how
    often their routers disagree."""

    total: float = 0.0
    count: int = 0
    largest: float = 0.0
    router_mismatch: float | None = None

    def add(self, logp_BT: Tensor, rollout_logp_BT: Tensor, mask_BT: Tensor) -> None:
        gap = (logp_BT.detach() - rollout_logp_BT).abs()[mask_BT]
        if gap.numel():
            self.total += float(gap.sum())
            self.count += gap.numel()
            self.largest = max(self.largest, float(gap.max()))

    def metrics(self) -> dict[str, float]:
        """Mean and maximum over all data-parallel ranks."""
        total, count = parallel.all_reduce([self.total, float(self.count)])
        found = {
            "train_rollout_logprob_diff/mean": total / max(count, 1.0),
            "train_rollout_logprob_diff/max": parallel.all_reduce([self.largest], dist.ReduceOp.MAX)[0],
        }
        if self.router_mismatch is not None:
            found["router_mismatch_frac"] = self.router_mismatch
        return parallel.from_last_stage(found)
