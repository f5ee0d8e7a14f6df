"""Samples of a step as JSON text, as the zip that a run writes, and as Parquet: megabytes and CPU seconds.

    python benchmarks/samples.py --samples 512 --tokens 5000

Parquet needs pyarrow (the `parquet` extra).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from relax_cli.roles.sample_files import SampleWriter, json_line, read_samples

FLOATS = ("log_probs", "values", "advantages", "returns")


def made_up(count: int, tokens: int) -> list[dict[str, Any]]:
    """Samples with numbers like those of a PPO step: most tokens are sure, values drift, lambda is 0.95."""
    rng = np.random.default_rng(0)
    found = []
    for row in range(count):
        unsure = rng.random(tokens) < 0.35
        values = np.cumsum(rng.normal(0, 0.01, tokens)) + 0.5
        advantages = 1 - values + rng.normal(0, 0.02, tokens)
        columns = (-rng.exponential(np.where(unsure, 0.5, 1e-3)), values, advantages, advantages + values)
        words = rng.choice(["the", "of", "therefore", "=", "42", "\n", "so", "we"], tokens)
        found.append(
            {"row": row, "group": row // 8, "prompt": "What is 6 x 7?", "response": " ".join(words), "reward": 1.0}
            | {"response_token_ids": np.minimum(rng.zipf(1.3, tokens), 150_000).astype(np.int32)}
            | {name: column.astype(np.float32) for name, column in zip(FLOATS, columns, strict=True)}
        )
    return found


def as_parquet(samples: list[dict[str, Any]], path: Path) -> None:
    """Everything Parquet can do for such numbers: zstd over bytes that are split by their place."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({name: [sample[name] for sample in samples] for name in samples[0]})
    split = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in FLOATS}
    texts = ["prompt", "response"]
    pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary=texts, column_encoding=split)


def main() -> None:
    """Print one line for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=5000)
    args = parser.parse_args()
    samples = made_up(args.samples, args.tokens)
    with tempfile.TemporaryDirectory() as folder:
        writer, text, parquet = SampleWriter(Path(folder)), Path(folder, "text"), Path(folder, "parquet")
        formats: dict[str, tuple[Path, Callable[[], object]]] = {
            "JSON text": (text, lambda: text.write_text("".join(map(json_line, samples)))),
            "zip (relax)": (Path(folder, "rollouts/step_000001.zip"), lambda: writer.write(1, samples)),
            "Parquet, zstd": (parquet, lambda: as_parquet(samples, parquet)),
        }
        sizes = {}
        for name, (path, write) in formats.items():
            started = time.process_time()
            write()
            seconds = time.process_time() - started
            sizes[name] = path.stat().st_size
            share = sizes[name] / sizes["JSON text"]
            print(f"{name:<14} {sizes[name] / 1e6:7.1f} MB ({share:.2f} of JSON text)  {seconds:5.2f} CPU-s to write")
        for numbers in (False, True):
            started = time.process_time()
            read_samples([Path(folder, "rollouts/step_000001.zip")], numbers=numbers)
            print(f"read zip, numbers {numbers!s:<5}  {time.process_time() - started:5.2f} CPU-s")


if __name__ == "__main__":
    main()
