"""CPU seconds of one optimizer step: right-padded samples, sorted and split ones, and one packed row.

    OMP_NUM_THREADS=1 python benchmarks/packed.py [--rounds 7] [--format json]

All three train the same model on the same samples, alternating in this one run, in this one process. "sorted / k" are k
padded micro-batches of neighbours in length, for the best k of 2, 4 and 8.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from ppo_step import VOCABULARY, make_inputs
from torch import Tensor

from relax_cli.algorithms.schedule import Schedule
from relax_cli.backends.device import select_device
from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.trainer import Build, MicroBatch, ModelOutput, TrainableModel
from relax_cli.config.schema import OptimizerSection, ParallelSection

CASES = {
    "16 x (16 + 32), fixed": (16, 16, 32, False),
    "16 x (16 + 32), ragged": (16, 16, 32, True),
    "16 x (16 + 128), ragged": (16, 16, 128, True),
    "16 x (16 + 512), ragged": (16, 16, 512, True),
    "64 x (16 + 128), ragged": (64, 16, 128, True),
    "128 x (6 + 4), fixed": (128, 6, 4, False),
    "128 x (6 + 4), ragged": (128, 6, 4, True),
}
"""Samples, prompt tokens, most response tokens; ragged ones are log-normal, a quarter of the most on average."""


def samples(lengths: list[int], prompt: int, *, packed: bool = False) -> MicroBatch:
    tokens = torch.randint(3, VOCABULARY, (len(lengths), prompt + max(lengths)))
    return MicroBatch(tokens, torch.full((len(lengths),), prompt), torch.tensor(lengths), packed=packed)


def variants(case: str) -> dict[str, list[MicroBatch]]:
    """The samples of a case as micro-batches."""
    count, prompt, most, ragged = CASES[case]
    draw = random.Random(0)
    mean, spread = math.log(most / 4) - 0.32, 0.8
    lengths = [max(1, min(most, round(draw.lognormvariate(mean, spread)))) if ragged else most for _ in range(count)]
    found = {"padded": [samples(lengths, prompt)], "packed": [samples(lengths, prompt, packed=True)]}
    for parts in (2, 4, 8):
        by_length, size = sorted(lengths), count // parts
        found[f"sorted / {parts}"] = [samples(by_length[i : i + size], prompt) for i in range(0, count, size)]
    return found


def loss(output: ModelOutput, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return output.main.sum() / 1000, {}


def measure(model: TrainableModel, case: str, rounds: int) -> dict[str, float]:
    """Median CPU milliseconds of each way; the first round is dropped."""
    ways = variants(case)
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, batches in ways.items():
            start = time.process_time()
            model.train_step(batches, loss)
            taken[way].append(1000 * (time.process_time() - start))
    return {way: statistics.median(times[1:]) for way, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="alternations; the first is dropped")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args()
    device = select_device("cpu")
    parallel.initialize(ParallelSection(), device, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        model_folder, _ = make_inputs(Path(folder))
        build = Build(ParallelSection(), device, seed=1)
        model = TrainableModel(
            "policy", model_folder, build, Schedule(OptimizerSection(), lr=1e-5, warmup_iters=0, decay_iters=100)
        )
    results = {case: measure(model, case, args.rounds) for case in CASES}
    if args.format == "json":
        print(json.dumps(results))
        return
    for case, ms in results.items():
        parts = min((way for way in ms if way.startswith("sorted")), key=ms.__getitem__)
        print(
            f"{case:26} padded {ms['padded']:7.1f} ms  {parts} {ms[parts]:6.1f} ms  packed {ms['packed']:6.1f} ms  "
            f"padded : packed {ms['padded'] / ms['packed']:.2f}"
        )


if __name__ == "__main__":
    main()
