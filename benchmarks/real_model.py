"""Share of the machine's matrix peak that each phase of a PPO step reaches, on a model of SmolLM2-135M's shape.

    python benchmarks/real_model.py [--layers 30] [--threads 2] [--rounds 3] [--format json]

The peak is measured in the same run, between the rounds. A share is the time that the phase's matrix products need at
the fp32 peak, over the CPU seconds the phase took: on a busy machine those say more than wall seconds. Random weights;
the sizes of `--recipe smollm2-135m-ppo-cpu`.
"""

from __future__ import annotations

import os
import sys

from relax_cli.engine.build import cpu_environment

if not (WORKER := cpu_environment(os.cpu_count() or 1)).items() <= os.environ.items():
    # Memory and threads as in the workers of a run, which find these settings when they start.
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **WORKER, "HF_HUB_OFFLINE": "1"})

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from checkpoint_hash import build, write_model
from torch import Tensor

from relax_cli.backends.megatron import products
from relax_cli.backends.megatron.micro_batch import MicroBatch, ModelKind, ModelOutput
from relax_cli.backends.megatron.trainer import TrainableModel
from relax_cli.backends.rollout.embedded.engine import EmbeddedEngine
from relax_cli.backends.rollout.protocol import Request, SamplingParams
from relax_cli.models.hybrid import read_any_spec
from relax_cli.models.spec import ModelSpec

SAMPLES, STEP, PROMPT, LONGEST = 32, 16, 45, 24
"""Of a rollout, of an optimizer step; tokens of a prompt, most of a response."""
SHAPES = ((1024, 576, 3072), (2048, 2048, 2048))
"""Rows, inner size and columns of products that are big enough for the peak."""


def seconds(action: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def peaks() -> dict[str, float]:
    """flops per CPU second of one core, by kind of product."""
    found: dict[str, float] = {}
    for rows, inner, columns in SHAPES:
        a, b = torch.randn(rows, inner), torch.randn(columns, inner)
        kinds: dict[str, Callable[[], Tensor]] = {
            "fp32, MKL": partial(torch.mm, a, b.t(), out=torch.empty(rows, columns)),
            "fp32, oneDNN": partial(products.product, a, b.t()),
            "bf16": partial(torch.mm, a.bfloat16(), b.t().bfloat16()),
        }
        for name, kind in kinds.items():
            kind()
            for _ in range(3):
                taken = sum(seconds(kind)[1] for _ in range(8))
                found[name] = max(found.get(name, 0.0), 8 * 2 * rows * inner * columns / taken)
    return found


def forward_flops(spec: ModelSpec, lengths: list[int], responses: list[int], *, head: bool) -> float:
    """Of the matrix products of one forward pass; the last layer's MLP and the head see response tokens only."""
    heads = spec.num_heads * spec.head_dim
    attention = spec.hidden_size * (2 * heads + 2 * spec.num_kv_heads * spec.head_dim)
    mlp = 3 * spec.hidden_size * spec.ffn_hidden_size
    every_token = spec.num_layers * attention + (spec.num_layers - 1) * mlp
    responded = mlp + (spec.hidden_size * spec.vocab_size if head else 0)
    # Two products over the causal half of each sample's square.
    scores = 2 * heads * spec.num_layers * sum(length * (length + 1) for length in lengths)
    return 2.0 * (every_token * sum(lengths) + responded * sum(responses)) + scores


def loss(output: ModelOutput, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return output.main.sum() / 1000, {}


def train(model: TrainableModel, steps: list[MicroBatch]) -> None:
    """An optimizer step for each batch."""
    for step in steps:
        model.train_step([step], loss)


def step_optimizer(model: TrainableModel, steps: int) -> None:
    """Adam alone."""
    for _ in range(steps):
        model.optimizer.step()


def phases(folder: Path, layers: int) -> dict[str, tuple[Callable[[], object], float]]:
    """What to measure, and its flops."""
    write_model(layers, folder)
    spec = read_any_spec(folder)
    draw = random.Random(0)
    responses = [draw.randint(4, LONGEST) for _ in range(SAMPLES)]
    steps = []
    for first in range(0, SAMPLES, STEP):
        lengths_B = torch.tensor(responses[first : first + STEP])
        tokens = torch.randint(3, spec.vocab_size, (STEP, PROMPT + LONGEST))
        steps.append(MicroBatch(tokens, torch.full((STEP,), PROMPT), lengths_B, packed=True))
    engine = EmbeddedEngine(folder, decode=None)
    requests = [
        Request(tuple(row[:PROMPT].tolist()), seed, most_tokens=most)
        for seed, (row, most) in enumerate(zip(torch.cat([s.tokens_BS for s in steps]), responses, strict=True))
    ]

    def generate(most: int) -> None:
        engine.generate(requests, SamplingParams(most, 1.0, 1.0, -1, stop_token_ids=()))

    prompts = forward_flops(spec, [PROMPT] * SAMPLES, [1] * SAMPLES, head=True)
    found: dict[str, tuple[Callable[[], object], float]] = {
        "rollout: prompts and a token": (lambda: generate(1), prompts)
    }
    lengths = [PROMPT + response - 1 for response in responses]
    found["rollout: all"] = (lambda: generate(LONGEST), forward_flops(spec, lengths, responses, head=True))
    roles: tuple[tuple[str, ModelKind, str], ...] = (
        ("critic", "value", "values"),
        ("actor", "policy", "log-probabilities"),
    )
    for name, kind, answers in roles:
        model = build(folder, kind)
        flops = forward_flops(spec, lengths, responses, head=kind == "policy")
        found[f"{name}: {answers}"] = (partial(model.forward, steps), flops)
        found[f"{name}: steps"] = (partial(train, model, steps), 3 * flops)
        found[f"{name}: of which Adam"] = (partial(step_optimizer, model, len(steps)), 0.0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30, help="30 is SmolLM2-135M; fewer is smaller")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each product")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds; one more warms up")
    parser.add_argument("--cpu-matmul-precision", choices=("fp32", "bf16"), default="fp32", help="as in `relax train`")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        measured = phases(Path(folder), args.layers)
    if args.cpu_matmul_precision == "bf16":
        products.install_bf16()
    peak: dict[str, float] = {}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in measured}
    for _ in range(args.rounds + 1):
        for name, rate in peaks().items():
            peak[name] = max(peak.get(name, 0.0), rate)
        for name, (action, _) in measured.items():
            taken[name].append(seconds(action))
    fp32 = max(rate for name, rate in peak.items() if name.startswith("fp32"))
    rows = {
        name: {
            "gflop": flops / 1e9,
            "wall": statistics.median(wall for wall, _ in taken[name][1:]),
            "cpu": (cpu := statistics.median(cpu for _, cpu in taken[name][1:])),
            "share": flops / fp32 / cpu,
        }
        for name, (_, flops) in measured.items()
    }
    if args.format == "json":
        print(json.dumps({"peak": peak, "threads": args.threads, "phases": rows}))
        return
    print(", ".join(f"{name}: {rate / 1e9:.0f} GFLOP per CPU second" for name, rate in peak.items()))
    for name, row in rows.items():
        shown = f"{row['gflop']:7.0f} GFLOP, {row['share']:4.0%} of the fp32 peak" if row["gflop"] else ""
        print(f"{name:30} {row['wall']:6.2f} s wall, {row['cpu']:6.2f} s CPU  {shown}")


if __name__ == "__main__":
    main()
