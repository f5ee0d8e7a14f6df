"""The evaluations of a run, as its folder has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_cli.roles import sample_files


@dataclass(frozen=True)
class Evaluation:
    """A held-out set after one step; step 0 is before the first."""

    step: int
    name: str
    metrics: dict[str, float]
    """By their names below `eval/NAME/`."""

    @property
    def text(self) -> str:
        """One line: the mean reward with its 95 % interval, and what passed, where that says more."""
        mean = self.metrics["reward/mean"]
        interval = f" ±{self.metrics['reward/ci95']:.3f}" if self.metrics.get("reward/ci95") else ""
        passed = "".join(
            f", {name} {value:.3f}"
            for name, value in self.metrics.items()
            if name.startswith(("pass@", "majority@")) and value != mean
        )
        return f"held-out set {self.name}, reward {mean:.3f}{interval}{passed}"

    def dict(self) -> dict[str, Any]:
        """For `--format json`."""
        return {"step": self.step, "name": self.name, **self.metrics}


def evaluations_of(record: Mapping[str, Any]) -> list[Evaluation]:
    """The evaluations in the metrics of a step, one a set."""
    sets: dict[str, dict[str, float]] = {}
    for key, value in record.items():
        if key.startswith("eval/"):
            _, name, metric = key.split("/", 2)
            sets.setdefault(name, {})[metric] = value
    return [Evaluation(record["step"], name, metrics) for name, metrics in sets.items()]


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """All evaluations of a run, in order."""
    with (run_dir / "metrics.jsonl").open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if '"eval/' in line]
    return [evaluation for line in lines for evaluation in evaluations_of(line)]


def read_samples(run_dir: Path, evaluation: Evaluation) -> list[dict[str, Any]]:
    """The judged samples of an evaluation, where they are still there."""
    paths = sample_files.sample_files(run_dir, "evals").get(evaluation.step, [])
    return [s for s in sample_files.read_samples(paths, numbers=False) if s["set"] == evaluation.name]
