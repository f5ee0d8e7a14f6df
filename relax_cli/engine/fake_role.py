"""One training role on tensors without memory: `python -m relax_cli.engine.fake_role`, a request and an answer in JSON.

The role, its model, its optimizer and its step are those of a run; the sample queue is full of the longest samples.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from relax_cli.backends.device import Device
from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.fake_step import Accounts, FakeModel, FakeTrainable
from relax_cli.config.schema import Config
from relax_cli.engine.build import RoleBuilder, WorkerSpec
from relax_cli.engine.transfer import LocalQueue
from relax_cli.plugin.graph import ROUTES
from relax_cli.preflight.memory.activations import largest_pass
from relax_cli.preflight.memory.sizes import Lengths

MICRO_BATCHES = 2
"""Of a rank: with the second one, what the first has left is there. A pipeline has as many under way as stages."""


class FakeBuilder(RoleBuilder):
    """Builds one rank of a role without memory, with a group that has no other ranks."""

    def __init__(self, spec: WorkerSpec, lengths: Lengths, accounts: Accounts) -> None:
        super().__init__(spec)
        self.accounts = accounts
        data_parallel = max(1, spec.ranks // self.config.parallel.grid)
        self.config = smaller(self.config, lengths, data_parallel)

    def _device(self) -> Device:
        dtype = torch.bfloat16 if self.config.parallel.device == "cuda" else torch.float32
        return Device("cpu", torch.device("cpu"), "fake", dtype, shared_memory=False)

    def _model_classes(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return partial(FakeTrainable, self.accounts), partial(FakeModel, self.accounts)


def smaller(config: Config, lengths: Lengths, data_parallel: int) -> Config:
    """A rollout of one optimizer step with few micro-batches; the largest of them is that of the run."""
    batch = config.batch
    largest = int(largest_pass(batch, lengths, data_parallel, packed=False, layout=config.parallel).samples)
    passes = max(MICRO_BATCHES, config.parallel.pipeline_model_parallel_size)
    samples = min(batch.samples_per_step, passes * largest * data_parallel)
    changes = {
        # All samples are equally long, so there is nothing to pad.
        "pack_sequences": False,
        "rollout_batch_size": -(-samples // batch.n_samples_per_prompt),
        "num_steps_per_rollout": 1,
        "global_batch_size": None,
        "num_rollout": 1,
    }
    # It is taken off rewards, which no memory of a device depends on.
    algorithm = config.algorithm.model_copy(update={"kl_coef": 0.0})
    return config.model_copy(update={"batch": batch.model_copy(update=changes), "algorithm": algorithm})


def longest_samples(builder: RoleBuilder, lengths: Lengths) -> LocalQueue:
    """The queue of a rollout whose samples are all as long as allowed."""
    queue, batch = LocalQueue(builder.graph), builder.config.batch
    rows = range(batch.samples_per_rollout)
    per_token = torch.zeros(lengths.response)
    same = {name: per_token for role in builder.graph.roles for name in role.writes} | {
        "tokens": torch.zeros(lengths.prompt + lengths.response, dtype=torch.int64),
        "prompt_lens": torch.tensor(lengths.prompt),
        "response_lens": torch.tensor(lengths.response),
        "response_mask": torch.ones(lengths.response, dtype=torch.int64),
        "rewards": torch.tensor(0.0),
        "truncated": torch.tensor(0),
        "bootstrap_values": torch.tensor(0.0),
        # Tokens go to the experts in turn.
        ROUTES: torch.zeros(0, dtype=torch.int16),
    }
    groups = [torch.tensor(row // batch.n_samples_per_prompt) for row in rows]
    queue.put(0, rows, {name: [value] * len(rows) for name, value in same.items()} | {"group_ids": groups})
    return queue


def step(role: Any) -> None:
    """What a run has the role do in a step."""
    if role.name == "critic":
        role.predict(0)
        role.update()
    elif role.name == "actor":
        role.train(0)
    else:
        role.score(0)


def main() -> None:
    """Answer the request on standard input: the peaks of the first rank of each stage, in bytes by phase and kind."""
    request = json.load(sys.stdin)
    ranks, stages = request["ranks"], request["config"]["parallel"]["pipeline_model_parallel_size"]
    lengths, found = Lengths(**request["lengths"]), []
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(request["model"]), "utf-8")
        for stage in range(stages):
            spec = WorkerSpec(
                role=request["role"],
                rank=stage * ranks // stages,
                ranks=ranks,
                threads=1,
                config=request["config"],
                model_folder=Path(folder),
                run_dir=Path(folder),
                load_from=None,
            )
            with Accounts() as accounts:
                builder = FakeBuilder(spec, lengths, accounts)
                role = builder.build(longest_samples(builder, lengths))
                role.wake()
                step(role)
                found.append(role.model.peaks)
            parallel.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
