"""What the orchestration of a step costs, with roles that compute nothing.

    python benchmarks/scale_sim.py [--workers 2,4,8] [--samples 256,1024,4096] [--tokens 256] [--steps 3]

The schedule, Ray, TransferQueue and the order of placement are the real ones. Every worker process plays one rank of
each role (rollout, critic, actor; the first also advantages): it writes and reads the queue's fields of its rows and
returns. What a step takes is then the schedule, the calls through Ray and the queue. Seconds are fitted to
`a + b·workers + c·samples`, and the fit is printed for sizes that this machine does not carry. Weights are not
published: what that moves is known by arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

from relax_cli.engine import imports
from relax_cli.engine.ray.launch import Place, in_order, server_places
from relax_cli.engine.ray.queue_keys import QueueKeys
from relax_cli.engine.ray.ranks import RayRanks
from relax_cli.engine.ray.watch import ProcessWatch, Whereabouts
from relax_cli.engine.sampling import Sampling
from relax_cli.engine.session import Call, Roles, Session
from relax_cli.engine.step import run_step
from relax_cli.roles.spread import Spread

LARGE = ((8, 1024), (64, 8192), (64, 100_000), (512, 100_000))
"""Workers and samples the fit is printed for."""


class SyntheticRank:
    """One rank of every role; a method takes no longer than its reads and writes of the queue."""

    def __init__(self, rank: int, ranks: int, samples: int, tokens: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.all_rows = list(range(samples))
        self.rows = self.all_rows[rank::ranks]
        generator = torch.Generator().manual_seed(rank)
        lengths = torch.randint(tokens // 4, tokens + 1, (len(self.rows),), generator=generator).tolist()
        self.lengths = dict(zip(self.rows, lengths, strict=True))

    def open_queue(self, keys: QueueKeys) -> None:
        """Start TransferQueue, owned by this worker."""
        from relax_cli.engine.transfer import open_transfer_queue

        open_transfer_queue(keys)

    def join(self, keys: QueueKeys) -> Whereabouts:
        """Connect to the queue."""
        from relax_cli.engine.transfer import TransferQueueStore
        from relax_cli.plugin.graph import ServiceGraph

        self.queue = TransferQueueStore(ServiceGraph(()), 600, keys)
        return Whereabouts("here", ray.get_runtime_context().get_node_id(), os.getpid())

    def run(self, call: Call) -> Any:
        """A call of the schedule."""
        return getattr(self, call.method)(*call.args)

    def wake(self) -> None:
        """Nothing to move."""

    sleep = wake

    def generate(self, rollout_id: int) -> dict[str, Spread]:
        """Write what rollout writes."""
        import torch

        sizes = list(self.lengths.values())
        scalars = [torch.tensor(size) for size in sizes]
        fields = {
            "tokens": [torch.zeros(2 * size, dtype=torch.int64) for size in sizes],
            "prompt_lens": scalars,
            "response_lens": scalars,
            "response_mask": [torch.ones(size, dtype=torch.int64) for size in sizes],
            "rollout_log_probs": [torch.zeros(size) for size in sizes],
            "rewards": [torch.tensor(0.0) for _ in sizes],
            "group_ids": scalars,
            "truncated": scalars,
        }
        self.bytes = sum(value.numel() * value.element_size() for values in fields.values() for value in values)
        started = time.perf_counter()
        self.queue.put(rollout_id, self.rows, fields)
        took = time.perf_counter() - started
        names = ("reward", "response_len", "prompt_len", "truncated")
        return {name: Spread.of(map(float, sizes)) for name in names} | {
            "sampling/put_seconds": Spread.of([took]),
            "sampling/bytes": Spread.of([self.bytes / len(self.rows)]),
        }

    def predict(self, rollout_id: int) -> dict[str, float]:
        """Read what the critic reads, write values."""
        import torch

        started = time.perf_counter()
        self.queue.get(rollout_id, self.rows, ["tokens", "prompt_lens", "response_mask", "rewards"])
        took = time.perf_counter() - started
        self.queue.put(rollout_id, self.rows, {"values": [torch.zeros(self.lengths[row]) for row in self.rows]})
        return {"get_seconds": took}

    def compute(self, rollout_id: int) -> dict[str, float]:
        """Read all rows as the advantages service does, write advantages and returns."""
        found = self.queue.get(rollout_id, self.all_rows, ["response_mask", "rewards", "values"])
        self.queue.put(rollout_id, self.all_rows, {"advantages": found["values"], "returns": found["values"]})
        return {}

    def train(self, rollout_id: int) -> dict[str, float]:
        """Read what the actor reads."""
        self.queue.get(rollout_id, self.rows, ["tokens", "response_mask", "rollout_log_probs", "advantages"])
        return {}

    def update(self) -> dict[str, float]:
        """The critic has read its rows."""
        return {}

    def weight_targets(self) -> list[Any]:
        """No servers."""
        return []

    def needs_weights(self) -> bool:
        """See `weight_targets`."""
        return False

    def dump(self, rollout_id: int, fields: Sequence[str]) -> None:
        """Samples stay unwritten."""

    def clear(self, rollout_id: int) -> None:
        """Drop the partition."""
        self.queue.clear(rollout_id)


class SyntheticSession(Session):
    """The ranks of one configuration, and the queue."""

    def __init__(self, workers: int, samples: int, tokens: int, folder: Path) -> None:
        keys = QueueKeys.new()
        actor = ray.remote(SyntheticRank).options(num_cpus=0)
        self.workers: list[Any] = [actor.remote(rank, workers, samples, tokens) for rank in range(workers)]
        ray.get(self.workers[0].open_queue.remote(keys))
        watch = ProcessWatch("here")
        for rank, place in enumerate(ray.get([worker.join.remote(keys) for worker in self.workers])):
            watch.add(f"rank {rank}", place)
        of_role = dict.fromkeys(("rollout", "critic", "actor"), self.workers) | {"advantages": self.workers[:1]}
        self.roles = Roles.of({name: RayRanks(name, ranks, folder, watch) for name, ranks in of_role.items()})

    def copy_weights(self, version: int) -> None:
        """No weights."""

    def close(self) -> None:
        """Ray ends with the script's block."""


@dataclass(frozen=True)
class Measured:
    """Medians of the steps of one size."""

    workers: int
    samples: int
    step_seconds: float
    put_seconds: float
    get_seconds: float
    bytes_per_sample: float
    driver_megabytes: float
    """Memory of the process that runs the schedule."""


def measure(workers: int, samples: int, tokens: int, steps: int) -> Measured:
    """One size, in a Ray and a queue of its own; the first step is not counted."""
    ray.init(
        "local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"worker_process_setup_hook": imports.HOOK},
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            session = SyntheticSession(workers, samples, tokens, Path(folder))
            found = [timed_step(session, rollout_id) for rollout_id in range(steps + 1)][1:]
    finally:
        ray.shutdown()
    seconds, put, get, size = (statistics.median(column) for column in zip(*found, strict=True))
    return Measured(workers, samples, seconds, put, get, size, psutil.Process().memory_info().rss / 1e6)


def timed_step(session: Session, rollout_id: int) -> tuple[float, float, float, float]:
    """Seconds of a step, of a put, of a get; bytes of a sample."""
    started = time.perf_counter()
    record = run_step(
        session,
        rollout_id,
        sampling=Sampling(),
        critic_only_steps=0,
        overlap_updates=False,
        dump_fields=(),
        starts_phase=lambda name: None,
    )
    took, metrics = time.perf_counter() - started, record.metrics
    return took, metrics["sampling/put_seconds"], metrics["get_seconds"], metrics["sampling/bytes"]


def placement_seconds(gpus: int) -> float:
    """What it takes to order the bundles of a cluster of 8-GPU nodes, and to give servers of 8 theirs."""
    places = [Place(i, f"10.0.{i // 8 // 256}.{i // 8 % 256}", str(i % 8)) for i in range(gpus)]
    started = time.perf_counter()
    server_places(in_order(places), 8, gpus // 8)
    return time.perf_counter() - started


def fitted(found: Sequence[Measured]) -> dict[str, float]:
    """`seconds = fixed + per_worker·workers + per_sample·samples`: least squares of relative errors, none below 0."""
    weights = np.array([1 / m.step_seconds for m in found])
    columns = np.array([[1, m.workers, m.samples] for m in found]) * weights[:, None]
    law = np.linalg.lstsq(columns, np.ones(len(found)), rcond=None)[0].clip(min=0)
    return dict(zip(("fixed", "per_worker", "per_sample"), map(float, law), strict=True))


def main() -> None:
    """Measure, fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2,4,8")
    parser.add_argument("--samples", default="256,1024,4096")
    parser.add_argument("--tokens", type=int, default=256, help="longest response; lengths are uniform from a quarter")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args()
    sizes = [(w, n) for w in map(int, args.workers.split(",")) for n in map(int, args.samples.split(","))]
    found = [measure(workers, samples, args.tokens, args.steps) for workers, samples in sizes]
    law = fitted(found)
    at = {size: law["fixed"] + law["per_worker"] * size[0] + law["per_sample"] * size[1] for size in LARGE}
    places = {gpus: placement_seconds(gpus) for gpus in (8, 64, 512)}
    if args.format == "json":
        expected = [{"workers": w, "samples": n, "step_seconds": seconds} for (w, n), seconds in at.items()]
        print(json.dumps({"measured": [vars(m) for m in found], "law": law, "expected": expected, "placement": places}))
        return
    print("workers  samples  s/step  ms/put  ms/get  bytes/sample  driver MB")
    for m in found:
        print(
            f"{m.workers:7}  {m.samples:7}  {m.step_seconds:6.3f}  {1e3 * m.put_seconds:6.1f}"
            f"  {1e3 * m.get_seconds:6.1f}  {m.bytes_per_sample:12.0f}  {m.driver_megabytes:9.0f}"
        )
    print(
        f"fit: {law['fixed']:.3f} s + {1e3 * law['per_worker']:.2f} ms per worker + "
        f"{1e6 * law['per_sample']:.0f} us per sample"
    )
    for (workers, samples), seconds in at.items():
        print(f"by the fit, {workers} workers and {samples} samples: {seconds:.1f} s a step")
    for gpus, seconds in places.items():
        print(f"ordering the bundles of {gpus} GPUs: {1e3 * seconds:.1f} ms")


if __name__ == "__main__":
    main()
