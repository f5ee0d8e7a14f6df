"""Where the metrics of a run may go besides `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from relax_cli.config.schema import RunSection
from relax_cli.plugin.records import Record


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run when it starts."""

    run_dir: Path
    config: Mapping[str, Any]
    """Section to option to value, without secrets."""
    done: int = 0
    """Steps that were finished before, in a run that is resumed; later ones come again."""

    @property
    def name(self) -> str:
        """Name of the run: that of its folder."""
        return self.run_dir.name

    def kept(self, name: str, new: Callable[[], str]) -> str:
        """A text that a resumed run finds again, such as an id; `new` makes it the first time."""
        path = self.run_dir / "logs" / f"{name}.txt"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(new(), "utf-8")
        return path.read_text("utf-8")


class TrackerWriter(Protocol):
    """Takes the metrics of one run."""

    def write(self, record: Mapping[str, Any]) -> None:
        """A step's record as `metrics.jsonl` has it, or an evaluation after that step."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """The run ended; the summary is empty where it failed."""


@dataclass(frozen=True)
class Tracker(Record):
    """A named tracker (`--track`)."""

    what = "tracker"
    references = ("opens",)
    opens: str
    """`"module:function"`, called with a `TrackedRun`, returns a `TrackerWriter`."""
    package: str = ""
    """Module that has to be installed."""
    install: str = ""
    """How, for example `pip install wandb`."""


BUILTIN_TRACKERS = {
    name: Tracker(name, summary, f"relax_cli.tracking.trackers:{opens}", name, f"pip install 'relax-cli[{name}]'")
    for name, opens, summary in (
        ("tensorboard", "TensorBoard", "files for TensorBoard in RUN_DIR/tb"),
        ("wandb", "Wandb", "Weights & Biases; without a network: WANDB_MODE=offline"),
        ("mlflow", "MLflow", "MLflow, at MLFLOW_TRACKING_URI"),
        ("trackio", "Trackio", "Trackio's local dashboard"),
    )
}


def tracker_names(run: RunSection) -> list[str]:
    """The trackers that a run asks for, each once."""
    return list(dict.fromkeys([*run.track, *(["tensorboard"] if run.tensorboard else [])]))
