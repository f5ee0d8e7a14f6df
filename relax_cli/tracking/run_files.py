"""The files of a run folder: written while it trains, and read afterwards by every command that looks at runs."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from relax_cli.checkpoint.layout import fsync_folder, replace_file
from relax_cli.errors import ConfigError, ResumeError, problem_kinds
from relax_cli.roles import sample_files
from relax_cli.roles.sample_files import Folder, Sample, json_line

declare = problem_kinds("Folders and checkpoints")
METRICS_FILE = declare(
    "metrics-file", "The metrics file of a run that is resumed cannot be read or continued.", option="--run-dir"
)
NO_RUN = declare(
    "run-folder-missing",
    "A command that looks at a run was given a folder without a readable `config.json` and `metrics.jsonl`.",
)
NO_SAMPLES = declare("samples-missing", "The samples of this step were not written (`--dump-rollouts`), or are gone.")
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


_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading JSON of another shape may raise."""


class MetricsWriter:
    """Appends one JSON object per step to `metrics.jsonl`; a line is on the disk when `write` returns.

    Opened with the number of finished steps. Later lines and a torn last line are from a run that was aborted after
    its last checkpoint: they are dropped, since those steps run again. So are all lines when nothing is finished.
    """

    def __init__(self, run_dir: Path, done: int = 0) -> None:
        """Open the file, which may not exist yet.
        Raises ResumeError: its last step is before step `done`, or it is not a metrics file."""
        self._path = run_dir / "metrics.jsonl"
        self._done = done
        self.last: dict[str, Any] | None = None
        """The newest record; None in a file without any."""
        self._late: list[dict[str, str]] = []
        """Warnings that no record has yet."""
        if self._path.exists():
            kept = _kept_lines(self._path, done)
            self.last = json.loads(kept[-1]) if kept else None
        self._file = self._path.open("a", encoding="utf-8")
        fsync_folder(run_dir)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the next step, `record["step"]`, or add an evaluation to the newest; NaN and infinity become null."""
        step = record["step"]
        if self.last is not None and step == self.last["step"] and is_evaluation(record):
            self._amend(record)
            return
        expected = self._done + 1 if self.last is None else self.last["step"] + 1
        starts = self.last is None and step == self._done  # with the evaluation before the first step
        assert starts or step == expected, f"step {step} was written where step {expected} is due"
        whole = dict(record) | self._warnings(record)
        self._file.write(json_line(whole))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.last = whole

    def warn(self, text: str) -> None:
        """Keep a warning for the record of the next step, or for the newest one when no step follows."""
        self._late.append({"seen": text})

    def _warnings(self, record: Mapping[str, Any]) -> dict[str, Any]:
        found, self._late = [*record.get("warnings", ()), *self._late], []
        return {"warnings": found} if found else {}

    def _amend(self, record: Mapping[str, Any]) -> None:
        assert self.last is not None, "there is a newest record"
        self.last |= {name: value for name, value in record.items() if name != "time"}
        before, _, _ = self._path.read_text("utf-8").removesuffix("\n").rpartition("\n")
        self._file.close()
        replace_file(self._path, (before and before + "\n") + json_line(self.last))
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        if self._late and self.last is not None:
            # The disk that a warning is about may refuse it: a person has seen it on the screen.
            with contextlib.suppress(OSError):
                self._amend(self._warnings(self.last))
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
            return
        self._late = []  # The newest line may be torn.
        # What could not be written before cannot be written now, either: the first failure is the one to report.
        with contextlib.suppress(OSError):
            self.close()


def is_evaluation(record: Mapping[str, Any]) -> bool:
    """Whether a record has the metrics of an evaluation alone."""
    names = record.keys() - {"step", "time"}
    return bool(names) and all(name.startswith("eval/") for name in names)


def write_config(run_dir: Path, dump: Mapping[str, Any]) -> Path:
    """Write the resolved configuration (`model_dump(mode="json")`) to `config.json`; returns the file."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "config.json"
    replace_file(path, json.dumps(dump, indent=2, ensure_ascii=False) + "\n")
    return path


def _kept_lines(path: Path, done: int) -> list[str]:
    """The complete lines of the first `done` steps, which must be consecutive; the file is cut to them."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _bad_metrics(path, str(error), "a text file with one JSON object per line") from None
    kept: list[str] = []
    last_step: int | None = None
    # Without its newline the last piece is a torn line, or nothing.
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        step = None
        with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
            step = json.loads(line)["step"]
        if not isinstance(step, int) or (last_step is not None and step != last_step + 1):
            expected = "a step's metrics" if last_step is None else f"the metrics of step {last_step + 1}"
            raise _bad_metrics(path, line[:60], expected, number)
        last_step = step
        if step <= done and done:
            kept.append(line + "\n")
    if kept and last_step is not None and last_step < done:
        raise _bad_metrics(path, f"last step {last_step}", f"last step {done} or later")
    if "".join(kept) != text:
        replace_file(path, "".join(kept))
    return kept


def _bad_metrics(path: Path, got: str, expected: str, line: int | None = None) -> ResumeError:
    return ResumeError(
        METRICS_FILE(
            "the metrics of this run folder do not continue to the step resumed from",
            fix=f"--run-dir {shlex.quote(f'{path.parent}-2')}",
            where=str(path) if line is None else f"{path}:{line}",
            got=got,
            expected=expected,
        )
    )


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

    @property
    def evaluations(self) -> list[Evaluation]:
        """All of them, in order."""
        return [evaluation for record in self.metrics for evaluation in evaluations_of(record)]

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

            try:
                self._tokenizer = Tokenizer.from_file(str(path))
            except Exception as error:  # The library raises nothing narrower.
                fix = "move the file away: tokens are then shown by their numbers"
                raise _no_run("the tokenizer of this run is damaged", path, error, fix) from error
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
    path, metrics = Path(run_dir), list[dict[str, Any]]()
    place, file = path / "config.json", path / "metrics.jsonl"
    near = [*path.glob("*/metrics.jsonl"), *path.parent.glob("metrics.jsonl")]
    message = "this is not the folder of a run"
    fix = "give the --run-dir of a run" + (f", for example {near[0].parent}" if near else "")
    try:
        record = json.loads(place.read_text("utf-8"))
        if not all(isinstance(section, dict) for section in record["config"].values()):
            raise TypeError("a section of config is not an object")
        message, fix = (
            "the metrics of this run are damaged",
            "remove this line from a copy of the folder, and give that",
        )
        for number, line in enumerate(file.read_bytes().split(b"\n")[:-1] if file.exists() else [], start=1):
            place = Path(f"{file}:{number}")
            metrics.append(_record(line))
    except _UNREADABLE as error:
        raise _no_run(message, place, error, fix) from error
    return RunFolder(path, record, metrics)


def _record(line: bytes) -> dict[str, Any]:
    """A line of `metrics.jsonl`. Raises one of `_UNREADABLE`: it is something else."""
    record: dict[str, Any] = json.loads(line)
    kinds = {"step": int, "phase_seconds": dict, "warnings": list}
    wrong = [name for name, kind in kinds.items() if not isinstance(record.get(name, kind()), kind)]
    wrong += [name for name in record if name.startswith("eval/") and name.count("/") < 2]
    if wrong or "step" not in record:
        raise TypeError(f"{wrong[0] if wrong else 'step'} is missing or of another type")
    return record


def _no_run(message: str, place: Path, error: Exception, fix: str) -> ConfigError:
    got, expected = f"{type(error).__name__}: {error}", "a folder that `relax train` wrote, with config.json"
    return ConfigError(NO_RUN(message, where=str(place), got=got, expected=expected, fix=fix))


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
