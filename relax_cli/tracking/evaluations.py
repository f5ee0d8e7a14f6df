"""The evaluations of a run, as its folder has them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Evaluation:
    """A held-out set after one step; step 0 is before the first."""

    step: int
    name: str
    metrics: dict[str, float]
    """By their names below `eval/NAME/`."""

    @property
    def text(self) -> str:
        """One line."""
        return f"held-out set {self.name}, reward {self.metrics['reward/mean']:.3f}"

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


def read_samples(run_dir: Path, evaluation: Evaluation, count: int) -> list[dict[str, Any]]:
    """The first judged samples of an evaluation."""

    def samples() -> Iterator[dict[str, Any]]:
        with (run_dir / "evals" / f"step_{evaluation.step:06d}.jsonl").open(encoding="utf-8") as file:
            yield from (sample for sample in map(json.loads, file) if sample["set"] == evaluation.name)

    return list(islice(samples(), count))
