"""How time and memory of a PPO step grow with batch, response length, model and workers, and whether memory stays flat.

    python benchmarks/growth.py [--factors 1,2,4,8] [--steps 4] [--axes batch,length,layers,workers] [--long 300]

One axis at a time is multiplied, the others stay: 32 prompts, 16 tokens, 4 layers of a random Qwen2, one process
(`--launcher local`, one thread); the axis `workers` runs on Ray. The exponent e of `seconds ~ factor^e` is fitted to
all points of an axis. `--long N` trains N steps, and prints by how much the memory of the process grows a step after
the first third.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from ppo_step import make_inputs, quiet_environment

BASE = {"batch": 32, "length": 16, "layers": 4, "workers": 1}


def records(work: Path, size: dict[str, int], steps: int, launcher: str) -> list[dict[str, Any]]:
    """The metrics of every step of a run."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        model, prompts = make_inputs(Path(folder), layers=size["layers"])
        ranks = {"actor": [1, 1], "critic": [1, 1], "rollout": [1, size["workers"]], "advantages": [1, 0]}
        options = {
            "advantage-estimator": "ppo",
            "hf-checkpoint": model,
            "prompt-data": prompts,
            "label-key": "label",
            "rm-type": "exact",
            "resource": json.dumps(ranks),
            "launcher": launcher,
            "threads-per-rank": 1,
            "rollout-batch-size": size["batch"],
            "num-steps-per-rollout": 1,
            "micro-batch-size": 8,
            "num-rollout": steps,
            "rollout-max-response-len": size["length"],
            "run-dir": Path(folder) / "run",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "relax_cli", "train", *words, "--colocate", "--use-rollout-logprobs"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=sys.stderr, env=quiet_environment())
        text = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    return [record for record in map(json.loads, text.splitlines()) if "phase_seconds" in record]


def measured(work: Path, size: dict[str, int], steps: int, launcher: str) -> tuple[float, float]:
    """Median seconds of a step after the first, and gigabytes of all processes at the end."""
    found = records(work, size, steps, launcher)
    return statistics.median(sum(r["phase_seconds"].values()) for r in found[1:]), found[-1]["memory_gb"]


def exponent(factors: list[int], values: list[float]) -> float:
    """Slope of the logarithms."""
    return float(np.polyfit(np.log(factors), np.log(values), 1)[0])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factors", default="1,2,4,8")
    parser.add_argument("--axes", default=",".join(BASE))
    parser.add_argument("--steps", type=int, default=4, help="of each run; the first is dropped")
    parser.add_argument("--long", type=int, default=300, help="steps of the run that looks for leaks; 0: none")
    args = parser.parse_args()
    factors = [int(factor) for factor in args.factors.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for axis in args.axes.split(","):
            launcher = "ray" if axis == "workers" else "local"
            sizes = [{**BASE, axis: BASE[axis] * factor} for factor in factors]
            found = [measured(work, size, args.steps, launcher) for size in sizes]
            seconds, memory = [list(column) for column in zip(*found, strict=True)]
            for size, taken, used in zip(sizes, seconds, memory, strict=True):
                print(f"{axis:>8} {size[axis]:5}  {taken:7.3f} s/step  {used:6.2f} GB")
            print(
                f"{axis:>8}  exponents: time {exponent(factors, seconds):.2f}, memory {exponent(factors, memory):.2f}"
            )
        if args.long:
            kept = records(work, BASE, args.long, "local")[args.long // 3 :]
            slope = np.polyfit(range(len(kept)), [r["memory_gb"] for r in kept], 1)[0]
            print(f"{args.long} steps: {1e6 * slope:.1f} kB a step, {kept[-1]['memory_gb']:.3f} GB at the end")


if __name__ == "__main__":
    main()
