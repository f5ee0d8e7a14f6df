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
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from ppo_step import make_inputs, quiet_environment, train_command

BASE = {"batch": 32, "length": 16, "layers": 4, "workers": 1}


def records(work: Path, size: dict[str, int], steps: int, launcher: str) -> list[dict[str, Any]]:
    """The metrics of every step of a run, each with `driver_gb`: the memory of the first process at that time."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        model, prompts = make_inputs(Path(folder), layers=size["layers"])
        run_dir = Path(folder) / "run"
        sizes = {
            "launcher": launcher,
            "threads-per-rank": 1,
            "rollout-batch-size": size["batch"],
            "num-steps-per-rollout": 1,
            "micro-batch-size": 8,
            "num-rollout": steps,
            "rollout-max-response-len": size["length"],
        }
        command = train_command(model, prompts, run_dir, size["workers"], sizes)
        driver = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=sys.stderr, env=quiet_environment())
        found: list[dict[str, Any]] = []
        while driver.poll() is None:
            new = steps_of(run_dir)[len(found) :]
            if new:
                memory = driver.memory_info()
                found += [record | {"driver_gb": (memory.rss - memory.shared) / 1e9} for record in new]
            time.sleep(0.05)
        if driver.returncode:
            raise SystemExit(f"relax train ended with exit code {driver.returncode}")
    return found


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics written so far, whole lines only."""
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True) if metrics.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in found if "phase_seconds" in record]


def measured(work: Path, size: dict[str, int], steps: int, launcher: str) -> tuple[float, float, float]:
    """Median seconds of a step after the first; gigabytes of all processes and of the driver at the end."""
    found = records(work, size, steps, launcher)
    seconds = statistics.median(sum(record["phase_seconds"].values()) for record in found[1:])
    return seconds, found[-1]["memory_gb"], found[-1]["driver_gb"]


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
            columns = [list(column) for column in zip(*found, strict=True)]
            for size, (taken, used, driver) in zip(sizes, found, strict=True):
                print(
                    f"{axis:>8} {size[axis]:5}  {taken:7.3f} s/step  {used:6.2f} GB, driver {driver:.3f} GB", flush=True
                )
            time_, memory, driver = (exponent(factors, column) for column in columns)
            print(f"{axis:>8}  exponents: time {time_:.2f}, memory {memory:.2f}, driver {driver:.2f}", flush=True)
        if args.long:
            kept = records(work, BASE, args.long, "local")[args.long // 3 :]
            slope = np.polyfit(range(len(kept)), [r["memory_gb"] for r in kept], 1)[0]
            print(f"{args.long} steps: {1e6 * slope:.1f} kB a step, {kept[-1]['memory_gb']:.3f} GB at the end")


if __name__ == "__main__":
    main()
