"""Tokens per CPU second: the embedded rollout engine against Hugging Face `generate`, alternating, one thread.

python benchmarks/sampler.py [--rounds 9] [--format json]
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

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

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


def cpu_seconds(action: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    started = time.process_time()
    action()
    return time.process_time() - started


def measure(config: Qwen2Config | Qwen3Config, shape: tuple[int, int, int], rounds: int) -> dict[str, float]:
    """Median tokens per CPU second of both; every response has its full length."""
    rows, prompt, new = shape
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.randint(0, config.vocab_size, (rows, prompt))
    sampling = SamplingParams(new, 1.0, 1.0, -1, stop_token_ids=())
    requests = [Request(tuple(row), seed) for seed, row in enumerate(ids.tolist())]
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = EmbeddedEngine(Path(folder), decode=None)
    ours, theirs = [], []
    for number in range(rounds + 1):
        first = cpu_seconds(lambda: engine.generate(requests, sampling))
        second = cpu_seconds(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options))
        if number:
            ours.append(rows * new / first)
            theirs.append(rows * new / second)
    relax, reference = statistics.median(ours), statistics.median(theirs)
    return {"relax": relax, "hugging_face": reference, "ratio": relax / reference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="measured alternations; one more warms up")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: measure(config, shape, args.rounds) for name, (config, shape) in CASES.items()}
    if args.format == "json":
        print(json.dumps({"tokens_per_cpu_second": results, "reference": "transformers generate", "threads": 1}))
        return
    for name, result in results.items():
        print(
            f"{name}: relax {result['relax']:.0f}, Hugging Face {result['hugging_face']:.0f} tokens per CPU second, "
            f"ratio {result['ratio']:.2f}"
        )


if __name__ == "__main__":
    main()
