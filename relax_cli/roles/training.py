"""What Actor and Critic share: a Megatron model, the samples of this data-parallel rank, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.trainer import MicroBatch, ModelOutput, TrainableModel
from relax_cli.checkpoint import store
from relax_cli.config.schema import BatchSection
from relax_cli.roles.batching import Columns, chunks_by_length, make_micro_batch, plan_rows
from relax_cli.roles.protocols import SampleQueue


@dataclass(frozen=True)
class RolloutShare:
    """The part of one rollout that this data-parallel rank works on."""

    columns: Columns
    step_rows: list[list[int]]
    """Own rows of each optimizer step; a step may have none."""
    step_tokens: list[float]
    """Trainable tokens of each optimizer step over all ranks."""

    @property
    def rows(self) -> list[int]:
        """All own rows, ascending."""
        return sorted(row for rows in self.step_rows for row in rows)


class TrainingRole:
    """A model that learns from the queue. One instance per rank; all ranks of a role call the same methods."""

    name: str
    """Role name, `actor` or `critic`."""

    def __init__(self, model: TrainableModel, queue: SampleQueue, batch: BatchSection, save_dir: Path | None) -> None:
        self.model = model
        self.queue = queue
        self.batch = batch
        self.save_dir = save_dir
        self.awake = True

    def wake(self) -> None:
        """Bring parameters, gradients and optimizer state onto the device."""
        if not self.awake:
            self.model.wake()
            self.awake = True

    def sleep(self) -> None:
        """Leave the device to the other roles."""
        if self.awake:
            self.model.sleep()
            self.awake = False

    def fetch_share(self, rollout_id: int, names: Sequence[str]) -> RolloutShare:
        """Read this rank's samples; lengths of all samples are read to plan, everything else only for own rows."""
        assert self.awake, f"{self.name} works only while awake"
        every_row = range(self.batch.samples_per_rollout)
        lengths = self.queue.get(rollout_id, every_row, ["prompt_lens", "response_lens"])
        totals = [int(p) + int(r) for p, r in zip(lengths["prompt_lens"], lengths["response_lens"], strict=True)]
        ranks, rank = parallel.data_parallel_size(), parallel.data_parallel_rank()
        step_rows = plan_rows(totals, self.batch.steps_per_rollout, ranks, rank)
        rows = sorted(row for rows in step_rows for row in rows)
        wanted = ["tokens", "prompt_lens", "response_lens", "response_mask", *names]
        fields = self.queue.get(rollout_id, rows, wanted) if rows else {name: [] for name in wanted}
        columns = {name: dict(zip(rows, values, strict=True)) for name, values in fields.items()}
        counts = [float(sum(int(columns["response_mask"][row].sum()) for row in rows)) for rows in step_rows]
        return RolloutShare(columns, step_rows, parallel.sum_over_data_parallel(counts))

    def forward(self, share: RolloutShare) -> list[tuple[list[int], ModelOutput]]:
        """Forward without gradient over all own rows: pairs of rows and their output."""
        chunks = chunks_by_length(share.columns, share.rows, self.batch.micro_batch_size)
        outputs = self.model.forward([make_micro_batch(share.columns, chunk, ()) for chunk in chunks])
        return list(zip(chunks, outputs, strict=True))

    def micro_batches(self, share: RolloutShare, step: int, names: Sequence[str]) -> list[MicroBatch]:
        """The micro-batches of one optimizer step, each carrying `response_mask` and the named fields."""
        chunks = chunks_by_length(share.columns, share.step_rows[step], self.batch.micro_batch_size)
        return [make_micro_batch(share.columns, chunk, ["response_mask", *names]) for chunk in chunks]

    def loss_denominator(self, share: RolloutShare, step: int, per_token: bool) -> float:
        """Trainable tokens or samples of the whole optimizer step, the same on every rank."""
        return max(share.step_tokens[step], 1.0) if per_token else float(self.batch.samples_per_step)

    def write_checkpoint(self, iteration: int, meta: dict[str, Any]) -> None:
        """Write everything of `iteration` under a temporary name."""
        assert self.save_dir is not None
        store.write(self.model, self.save_dir, iteration, self.name, meta)

    def commit_checkpoint(self, iteration: int) -> None:
        """Give the written checkpoint its final name."""
        assert self.save_dir is not None
        store.commit(self.save_dir, iteration)

    def publish_checkpoint(self, iteration: int, keep: int | None) -> None:
        """Move the tracker to `iteration`, then drop the checkpoints beyond the newest `keep`."""
        assert self.save_dir is not None
        store.publish(self.save_dir, iteration, keep)

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Restore model, optimizer, schedule and random state; returns what the checkpoint says of itself."""
        return store.load(self.model, folder)


def mean_over_steps(records: Sequence[dict[str, float]]) -> dict[str, float]:
    """Plain mean of each metric over the optimizer steps of a rollout."""
    return {name: sum(record[name] for record in records) / len(records) for name in records[0]}


def trainable(batch: MicroBatch) -> Tensor:
    """Mask of trainable response tokens `[B, T]`, bool."""
    return batch.fields["response_mask"] != 0


def masked_token_mean(value_BT: Tensor, mask_BT: Tensor, tokens: float) -> Tensor:
    """This micro-batch's part of the mean over `tokens` trainable tokens of all ranks."""
    return torch.where(mask_BT, value_BT.detach(), 0.0).sum() / max(tokens, 1.0)
