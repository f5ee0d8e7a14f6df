"""Tokens per CPU second: the embedded rollout engine against Hugging Face `generate`, alternating, one thread.

    python benchmarks/sampler.py [--lengths fixed|ragged] [--rounds 9] [--format json]

With ragged lengths `generate` gets a stopping criterion for each row, so that both sides sample the same lengths.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", HF_HUB_OFFLINE="1")

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lengths import add_lengths, response_length
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config, StoppingCriteria, StoppingCriteriaList

from relax_cli.backends.rollout.embedded.engine import EmbeddedEngine
from relax_cli.backends.rollout.protocol import Request, SamplingParams

CASES = {
    "Qwen2, 2.5 M parameters, 64 x (16 + 32)": (
        Qwen2Config(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        ),
        (64, 16, 32),
    ),
    "Qwen3, 0.5 M parameters, 256 x (6 + 4)": (
        Qwen3Config(
            vocab_size=16,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        ),
        (256, 6, 4),
    ),
}


class AtLength(StoppingCriteria):  # type: ignore[misc]
    """Ends each row of a batch at a length of its own."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths_B = torch.tensor(lengths)

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return self._lengths_B <= input_ids.shape[1]


def seconds(action: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(
    config: Qwen2Config | Qwen3Config, shape: tuple[int, int, int], rounds: int, *, ragged: bool
) -> dict[str, float]:
    """Median tokens per wall and CPU second of both."""
    rows, prompt, new = shape
    new *= 4 if ragged else 1
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.randint(0, config.vocab_size, (rows, prompt))
    lengths = [response_length((row, *words), new) if ragged else new for row, words in enumerate(ids.tolist())]
    sampling = SamplingParams(new, 1.0, 1.0, -1, stop_token_ids=())
    prompts = zip(ids.tolist(), lengths, strict=True)
    requests = [Request(tuple(row), seed, most_tokens=most) for seed, (row, most) in enumerate(prompts)]
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": new, "pad_token_id": 0}
    if ragged:
        ends = AtLength([prompt + length for length in lengths])
        options["stopping_criteria"] = StoppingCriteriaList([ends])
    model.generation_config.eos_token_id = None
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = EmbeddedEngine(Path(folder), decode=None)
    taken: list[tuple[float, ...]] = []
    for _ in range(rounds + 1):
        ours = seconds(lambda: engine.generate(requests, sampling))
        theirs = seconds(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options))
        taken.append((*ours, *theirs))
    # The first round warms up.
    names = ("relax_wall", "relax_cpu", "hugging_face_wall", "hugging_face_cpu")
    found = {
        name: sum(lengths) / statistics.median(times)
        for name, times in zip(names, zip(*taken[1:], strict=True), strict=True)
    }
    return found | {f"ratio_{kind}": found[f"relax_{kind}"] / found[f"hugging_face_{kind}"] for kind in ("wall", "cpu")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_lengths(parser)
    parser.add_argument("--rounds", type=int, default=9, help="measured alternations; one more warms up")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ragged = args.lengths == "ragged"
    results = {name: measure(config, shape, args.rounds, ragged=ragged) for name, (config, shape) in CASES.items()}
    if args.format == "json":
        print(json.dumps({"tokens_per_second": results, "lengths": args.lengths, "reference": "transformers generate"}))
        return
    for name, result in results.items():
        for kind in ("wall", "cpu"):
            print(
                f"{name}, {args.lengths}, per {kind} second: relax {result[f'relax_{kind}']:.0f}, "
                f"Hugging Face {result[f'hugging_face_{kind}']:.0f} tokens, ratio {result[f'ratio_{kind}']:.2f}"
            )


if __name__ == "__main__":
    main()
