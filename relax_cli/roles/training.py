"""What roles with a model share: the samples of this data-parallel rank, optimizer steps, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relax_cli.algorithms.reduce import Mode
from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.loaded import LoadedModel
from relax_cli.backends.megatron.trainer import LossFunction, MicroBatch, ModelOutput, TrainableModel
from relax_cli.checkpoint import store
from relax_cli.checkpoint.fingerprint import data_position
from relax_cli.config.schema import Aggregation, BatchSection
from relax_cli.errors import RunError, problem_kind
from relax_cli.roles.batching import (
    Columns,
    make_micro_batch,
    micro_batch_rows,
    plan_rows,
    read_columns,
    unpad,
    write_columns,
)
from relax_cli.roles.context import RoleContext
from relax_cli.roles.sample_files import TRAINED_FIELDS

NAN_GRADIENT = problem_kind(
    "nan-gradient",
    "Objective",
    "A gradient was not finite. No weight changed; `--on-nan-grad` says whether the run continues.",
)

SAMPLE = ("tokens", "prompt_lens", "response_lens", "response_mask")
"""Queue fields that every role with a model reads."""


@dataclass(frozen=True)
class RolloutShare:
    """The part of one rollout that this data-parallel rank works on."""

    rollout_id: int
    columns: Columns
    step_rows: list[list[int]]
    """Own rows of each optimizer step; a step may have none."""
    step_tokens: list[float]
    """Trainable tokens of each optimizer step over all ranks."""

    @property
    def rows(self) -> list[int]:
        return sorted(row for rows in self.step_rows for row in rows)


class ModelRole:
    """A model that works on samples of the queue. One instance per rank; all ranks call the same methods."""

    name: str

    def __init__(self, model: LoadedModel, context: RoleContext) -> None:
        self.model = model
        self.queue = context.queue
        self.batch, self.tokens_of_rank = context.config.batch, context.config.parallel.tokens_of_rank
        self.packed = model.packs if self.batch.pack_sequences is None else self.batch.pack_sequences
        self.awake = True

    def wake(self) -> None:
        if not self.awake:
            self.model.wake()
            self.awake = True

    def sleep(self) -> None:
        if self.awake:
            self.model.sleep()
            self.awake = False

    def fetch_share(self, rollout_id: int, names: Sequence[str]) -> RolloutShare:
        """Read `SAMPLE` and the named fields of this rank's samples; lengths of all samples are read to plan."""
        assert self.awake, f"{self.name} works only while awake"
        ranks, rank = parallel.DATA.size, parallel.DATA.rank
        wanted = list(dict.fromkeys([*SAMPLE, *names]))
        # Every request and every value has its price: what is read to plan is not read twice.
        first = ["prompt_lens", "response_lens"] if ranks > 1 else wanted
        of_all = self.queue.get(rollout_id, range(self.batch.samples_per_rollout), first)
        totals = [int(p) + int(r) for p, r in zip(of_all["prompt_lens"], of_all["response_lens"], strict=True)]
        step_rows = plan_rows(totals, self.batch.steps_per_rollout, ranks, rank)
        share = RolloutShare(rollout_id, {}, step_rows, [])
        share.columns.update({name: {row: values[row] for row in share.rows} for name, values in of_all.items()})
        self.add_fields(share, [name for name in wanted if name not in first])
        masks = share.columns["response_mask"]
        counts = [float(sum(int(masks[row].sum()) for row in rows)) for rows in step_rows]
        return replace(share, step_tokens=parallel.all_reduce(counts))

    def add_fields(self, share: RolloutShare, names: Sequence[str]) -> None:
        rows = share.rows
        empty: Columns = {name: {} for name in names}
        share.columns.update(read_columns(self.queue, share.rollout_id, rows, names) if rows and names else empty)

    def write(self, share: RolloutShare, columns: Columns) -> None:
        """Write what the model says of own rows to the queue, from one of the ranks that computed it together."""
        if parallel.TENSOR.rank == parallel.CONTEXT.rank == 0 and parallel.is_last_stage():
            write_columns(self.queue, share.rollout_id, columns)

    def micro_batches(
        self, share: RolloutShare, rows: Sequence[int], fields: Sequence[str]
    ) -> tuple[list[list[int]], list[MicroBatch]]:
        """The given rows as micro-batches with the named fields, and which rows are in which."""
        chunks = micro_batch_rows(share.columns, rows, self.batch, self.packed, self.tokens_of_rank)
        return chunks, [make_micro_batch(share.columns, chunk, fields, packed=self.packed) for chunk in chunks]

    def answers(self, share: RolloutShare, pick: Callable[[ModelOutput], Tensor]) -> dict[int, Tensor]:
        """One `[T]` grid of the model's output for each own row, without gradient, on the CPU."""
        chunks, batches = self.micro_batches(share, share.rows, ())
        outputs = self.model.forward(batches)
        lengths = share.columns["response_lens"]
        found = (unpad(pick(output).cpu(), rows, lengths) for rows, output in zip(chunks, outputs, strict=True))
        return {row: values for grid in found for row, values in grid.items()}


class TrainingRole(ModelRole):
    """A model that learns from the queue."""

    model: TrainableModel

    def __init__(self, model: TrainableModel, context: RoleContext, *, save_dir: str | None) -> None:
        super().__init__(model, context)
        self.config, self.algorithm, self.options = context.config, context.config.algorithm, context.options
        self.aggregation = self.algorithm.aggregation(context.estimator.loss_aggregation)
        self.mode: Mode = "sample" if self.aggregation == "sample-mean" else "token"
        self._save_dir = save_dir
        self._group: store.Group = None
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self.dumped = context.config.run.dumped_numbers
        self.seen: dict[int, Tensor] = {}
        """What the model said of each own row when it learned from it."""

    def learn(
        self, share: RolloutShare, update: Callable[[int], dict[str, float]], *, passes: int = 1
    ) -> dict[str, float]:
        """`update(step)` for every optimizer step of the rollout, `passes` times over; metrics of all of them.
        Raises RunError: a gradient was not finite, and `--on-nan-grad` is `stop`."""
        before = self.model.optimizer_steps
        self.seen = {}
        records = [update(step) for _ in range(passes) for step in range(len(share.step_rows))]
        self.write(share, {TRAINED_FIELDS[self.name]: self.seen})
        taken, metrics = self.model.optimizer_steps - before, summarise(records)
        assert taken + metrics[f"{self.name}/skipped_steps"] == passes * self.batch.steps_per_rollout
        memory = {f"{self.name}/{name}": value for name, value in self.model.memory_metrics().items()}
        return metrics | {f"{self.name}/optimizer_steps": float(taken)} | memory

    def take_step(
        self,
        share: RolloutShare,
        step: int,
        fields: Sequence[str],
        loss_fn: LossFunction,
        *,
        entropy_grad: bool = False,
    ) -> dict[str, float]:
        """One optimizer step on the samples of `step`, with the named fields next to the tokens.
        Raises RunError: see `learn`; weights, moments and schedule are as they were before the step."""
        chunks, batches = self.micro_batches(share, share.step_rows[step], ["response_mask", *fields])
        outputs: list[Tensor] = []

        def watched(output: ModelOutput, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            outputs.append(output.main.detach())
            return loss_fn(output, batch)

        result = self.model.train_step(batches, watched, need_entropy_grad=entropy_grad)
        # Only the last stage of a pipeline computes outputs.
        for rows, output in zip(chunks, outputs, strict=parallel.is_last_stage()):
            found = unpad(output.cpu(), rows, share.columns["response_lens"]) if self.dumped else {}
            # Of the first pass: later ones see what the earlier ones changed.
            self.seen = {row: values for row, values in found.items() if row < self.dumped} | self.seen
        if result.skipped and self.config.optimizer.on_nan_grad == "stop":
            raise RunError(
                NAN_GRADIENT(
                    f"the gradient of the {self.name} is not finite; its weights are those of before the step",
                    where=f"step {share.rollout_id + 1}, optimizer step {step} of {self.batch.steps_per_rollout}",
                    got=f"gradient norm {result.grad_norm}",
                    expected="a finite norm",
                    fix="look at the rewards and log-probabilities of that rollout, or lower the learning rate; "
                    "--on-nan-grad skip leaves such steps out and counts them",
                )
            )
        own = {
            "load_balancing_loss": result.load_balancing_loss,
            "router_mismatch": result.router_mismatch,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "skipped_steps": float(result.skipped),
        }
        return result.metrics | {f"{self.name}/{name}": value for name, value in own.items() if value is not None}

    def loss_denominator(self, share: RolloutShare, step: int) -> float:
        longest = self.config.rollout.rollout_max_response_len
        return loss_denominator(self.aggregation, self.batch, share.step_tokens[step], longest)

    def write_checkpoint(self, iteration: int, meta: dict[str, Any]) -> None:
        """Write everything of `iteration` under a temporary name."""
        self._prepared(iteration, meta, copied=False)()

    def copy_checkpoint(self, iteration: int, meta: dict[str, Any]) -> None:
        """Copy everything of `iteration`, and begin to write the copy under a temporary name."""
        assert self._writing is None, "one checkpoint at a time"
        if self._writer is None:
            self._writer, self._group = ThreadPoolExecutor(1, "checkpoint"), store.own_group()
        self._writing = self._writer.submit(self._prepared(iteration, meta, copied=True))

    def finish_checkpoint(self) -> None:
        """Wait until the copy is written. Raises RunError: the disk refused."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _prepared(self, iteration: int, meta: dict[str, Any], *, copied: bool) -> Callable[[], None]:
        assert self._save_dir is not None, "a run without a save folder writes no checkpoint"
        seen = meta.get("prompts_drawn", iteration * self.batch.rollout_batch_size)
        meta = meta | {"data_position": data_position(iteration, seen, meta.get("prompts"))}
        folder = Path(self._save_dir).absolute()
        return store.prepare(self.model, folder, iteration, self.name, meta, copied=copied, group=self._group)

    def load_checkpoint(self, folder: Path) -> None:
        """Restore model, optimizer, schedule and random state."""
        store.load(self.model, folder)


def loss_denominator(kind: Aggregation, batch: BatchSection, tokens: float, longest_response: int) -> float:
    """What a loss of an optimizer step with so many trainable tokens is divided by."""
    match kind:
        case "sample-mean":
            return float(batch.samples_per_step)
        case "token-mean":
            return max(tokens, 1.0)
        case "constant":
            return float(batch.samples_per_step * longest_response)


def summarise(records: Sequence[dict[str, float]]) -> dict[str, float]:
    """Plain mean of each metric over the optimizer steps of a rollout; skipped steps are counted."""
    sums = {name: sum(record[name] for record in records) for name in records[0]}
    return {name: x if name.endswith("/skipped_steps") else x / len(records) for name, x in sums.items()}


def trainable(batch: MicroBatch) -> Tensor:
    """Mask of trainable response tokens `[B, T]`, bool."""
    return batch.fields["response_mask"] != 0


def masked_token_mean(value_BT: Tensor, mask_BT: Tensor, tokens: float) -> Tensor:
    """This micro-batch's part of the mean over `tokens` trainable tokens of all ranks."""
    return torch.where(mask_BT, value_BT.detach(), 0.0).sum() / max(tokens, 1.0)
