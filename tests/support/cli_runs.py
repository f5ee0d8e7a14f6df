"""Whole runs of `relax train` in a process of their own, as a user starts them, and their metrics."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RELAX = [sys.executable, "-m", "relax_cli"]
TIMES = {"time", "phase_seconds", "step_seconds", "tokens_per_second", "rollout/tokens_per_second", "memory_gb"}
Metrics = dict[str, Any]
"""What `metrics.jsonl` says of one step."""


def start(task: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    """Three short PPO steps, the first of them critic-only."""
    small = ["--rollout-batch-size", "32", "--micro-batch-size", "16", "--num-critic-only-steps", "1"]
    folders = ["--run-dir", str(out / "run"), "--save", str(out / "actor"), "--critic-save", str(out / "critic")]
    no_eval = ["--set", "eval.eval_prompt_data=[]", "--set", "eval.eval_interval=null"]
    command = [*RELAX, "train", "--recipe", str(task / "recipe.yaml"), *small, *folders, *no_eval, *options]
    # A process group of its own, as a shell gives it: Ctrl-C in a terminal reaches all of it.
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def train(task: Path, out: Path, *options: str) -> list[Metrics]:
    """Metrics of a run that must succeed."""
    process = start(task, out, *options)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return read_metrics(out)


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[str], pause: float = 0.02) -> None:
    """Wait until `ready`, as long as the run goes on."""
    deadline = time.monotonic() + 240
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(pause)


def read_metrics(out: Path) -> list[Metrics]:
    """Everything in `metrics.jsonl` that does not depend on the clock."""
    lines = (out / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    return without_times([json.loads(line) for line in lines])


def without_times(records: list[Metrics]) -> list[Metrics]:
    """What does not depend on the clock or on the machine's memory."""
    return [{k: v for k, v in r.items() if k not in TIMES and not re.search("memory|/seconds$", k)} for r in records]
