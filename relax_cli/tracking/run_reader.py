"""A run folder as it is read afterwards: metrics, evaluations, samples, and the numbers of each response token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from relax_cli.errors import ConfigError, problem_kind
from relax_cli.roles import sample_files
from relax_cli.roles.sample_files import Folder, Sample

NO_RUN = problem_kind(
    "run-folder-missing",
    "Folders and checkpoints",
    "A command that looks at a run was given a folder without a readable `config.json` and `metrics.jsonl`.",
)
NO_SAMPLES = problem_kind(
    "samples-missing",
    "Folders and checkpoints",
    "The samples of this step were not written (`--dump-rollouts`), or are gone.",
)
Numbers: TypeAlias = np.ndarray[Any, Any]
COLUMNS = {
    "log_probs": "log-prob",
    "ratio": "ratio",
    "values": "value",
    "reward": "reward",
    "advantages": "advantage",
    "returns": "return",
    "weight_versions": "weights",
}
"""Numbers of a token and their titles; `ratio` is exp(trainer − rollout engine) of its log-probability, `weights`
the number of steps after which it was sampled (with `--partial-rollout`)."""


@dataclass(frozen=True)
class RunFolder:
    """What is in the folder of a run, finished or not."""

    path: Path
    record: dict[str, Any]
    """`config.json`: `config`, `origins`, `command`, `versions`."""
    metrics: list[dict[str, Any]]
    """One record per step; step 0 is an evaluation before the first."""

    @property
    def config(self) -> dict[str, Any]:
        """The configuration by section."""
        found: dict[str, Any] = self.record["config"]
        return found

    def steps(self, folder: Folder = "rollouts") -> dict[int, list[Path]]:
        """The sample files of each step."""
        return sample_files.sample_files(self.path, folder)

    def samples(self, step: int | None, folder: Folder = "rollouts") -> list[Sample]:
        """The samples of a step, of the last one for None.
        Raises ConfigError: there are none, or the file is damaged."""
        steps = self.steps(folder)
        chosen = max(steps, default=0) if step is None else step
        if chosen not in steps:
            raise ConfigError(
                NO_SAMPLES(
                    "the run has no samples of this step",
                    where=str(self.path / folder),
                    got=f"step {chosen}",
                    expected=f"a step from {min(steps)} to {max(steps)}" if steps else "files step_*.zip",
                    fix=f"--step {max(steps)}" if steps else "choose a run that was trained with --dump-rollouts all",
                )
            )
        return sample_files.read_samples(steps[chosen])

    @cached_property
    def token_texts(self) -> TokenTexts:
        """What its token ids say."""
        return TokenTexts(self.path / "tokenizer.json")


class TokenTexts:
    """Texts of token ids; `#17` where the run folder has no tokenizer, as those of former versions."""

    def __init__(self, path: Path) -> None:
        self._tokenizer: Any = None
        if path.is_file():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path))
        self._known: dict[int, str] = {}

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens, special ones included."""
        if self._tokenizer is None:
            return " ".join(f"#{token}" for token in tokens)
        text: str = self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)
        return text

    def __getitem__(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self.decode([token]) or f"#{token}"
        return self._known[token]


def read_run(run_dir: str | Path) -> RunFolder:
    """The run in a folder, finished or not; a torn last line of a run that is being written is left out.

    Raises:
        ConfigError: it is not the folder of a run.
    """
    path, name = Path(run_dir), "config.json"
    try:
        record = json.loads((path / name).read_text("utf-8"))
        if not isinstance(record["config"], dict):
            raise TypeError("config is not an object")
        name = "metrics.jsonl"
        lines = (path / name).read_bytes().split(b"\n")[:-1] if (path / name).exists() else []
        metrics = [json.loads(line) for line in lines]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            NO_RUN(
                "this is not the folder of a run",
                where=str(path / name),
                got=f"{type(error).__name__}: {error}",
                expected="a folder that `relax train` wrote, with config.json and metrics.jsonl",
                fix="give the --run-dir of a run",
            )
        ) from error
    return RunFolder(path, record, [record for record in metrics if isinstance(record, dict)])


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


def is_trainable(sample: Mapping[str, Any]) -> Numbers:
    """For each response token whether it is trained; observations of an episode are not."""
    mask = sample.get("response_mask")
    return np.ones(len(sample["response_token_ids"]), bool) if mask is None else mask != 0


def token_numbers(sample: Sample) -> dict[str, Numbers]:
    """Those of `COLUMNS` that the sample has; NaN where a token has none."""
    found = {name: sample[name] for name in COLUMNS if isinstance(sample.get(name), np.ndarray)}
    trainable = is_trainable(sample)
    if "train_log_probs" in sample and "log_probs" in sample:
        with np.errstate(over="ignore", invalid="ignore"):
            found["ratio"] = np.exp(sample["train_log_probs"] - sample["log_probs"])
    if "token_rewards" in sample:
        found["reward"] = np.where(sample["token_rewards"] != 0, sample["token_rewards"], np.nan)
    elif trainable.any() and isinstance(sample["reward"], float):
        reward = np.full(len(trainable), np.nan, np.float32)
        reward[np.flatnonzero(trainable)[-1]] = sample["reward"]
        found["reward"] = reward
    return {name: np.where(trainable, found[name], np.nan) for name in COLUMNS if name in found}


def advantage(sample: Mapping[str, Any]) -> float | None:
    """The mean advantage of a sample's trainable tokens: with a group estimator, that of the sample."""
    trainable = is_trainable(sample)
    return float(sample["advantages"][trainable].mean()) if "advantages" in sample and trainable.any() else None
