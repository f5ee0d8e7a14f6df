"""What a role knows of its run, and the sample queue. Roles know neither Ray nor TransferQueue.

Fields of one sample in the queue (all torch tensors):

| field | shape, dtype | written by |
|---|---|---|
| tokens | [S] int64, prompt + response | rollout |
| prompt_lens, response_lens | scalar int64 | rollout |
| response_mask | [T] int64, 1 where trainable | rollout |
| rollout_log_probs | [T] float32 | rollout |
| rewards | scalar float32 | rollout |
| token_rewards | [T] float32, only of episodes: the reward of each turn on its last token | rollout |
| weight_versions | [T] int64, only with `--partial-rollout`: the weights that sampled each token | rollout |
| routed_experts | [(S - 1)·layers·k] int16, only with `--router-replay`: the experts that each token of prompt and
  response but the last was generated with; negative where the trainer chooses; empty: nowhere known | rollout |
| group_ids, truncated | scalar int64 | rollout |
| ref_log_probs | [T] float32 | reference, where a KL term needs it |
| values | [T] float32 | critic |
| bootstrap_values | scalar float32, 0 unless truncated | critic, with `--bootstrap-truncated` |
| train_log_probs, train_values | [T] float32, as training saw them | actor, critic, with `--dump-token-numbers` |
| advantages, returns | [T] float32 | advantages; without that service the actor writes `advantages` |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from relax_cli.config.schema import Config, Section
from relax_cli.plugin.graph import RoleSpec
from relax_cli.plugin.records import Estimator

if TYPE_CHECKING:
    from torch import Tensor


class SampleQueue(Protocol):
    """Moves per-sample fields between roles, one partition per rollout."""

    def put(self, rollout_id: int, rows: Sequence[int], fields: dict[str, list[Tensor]]) -> None:
        """Write `fields[name][i]` as the value of sample `rows[i]`."""

    def get(self, rollout_id: int, rows: Sequence[int], names: Sequence[str]) -> dict[str, list[Tensor]]:
        """Read fields of the given samples, in the order of `rows`; waits until written, up to a limit.
        Raises RunError: the limit passed; names what is missing and which role writes it."""

    def clear(self, rollout_id: int) -> None:
        """Drop the partition."""


@dataclass(frozen=True)
class RoleContext:
    """The run, seen from one rank of one role."""

    config: Config
    estimator: Estimator
    options: Section
    """The estimator's own options."""
    spec: RoleSpec
    """The role and the queue fields that it reads and writes."""
    queue: SampleQueue
    run_dir: Path
    rank: int
    ranks: int
