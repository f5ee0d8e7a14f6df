"""Where the record of each step goes, while the run trains."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from relax_cli.config.redact import config_dump
from relax_cli.config.schema import Config
from relax_cli.plugin.manager import Plugins
from relax_cli.plugin.trackers import TrackedRun, tracker_names
from relax_cli.tracking.live import StepDisplay
from relax_cli.tracking.symptoms import Warned
from relax_cli.tracking.trackers import Trackers
from relax_cli.tracking.writers import MetricsWriter


@dataclass(frozen=True)
class Recorder:
    """Hands each step to the metrics file, the trackers, the screen and the plugins, in this order."""

    metrics: MetricsWriter
    trackers: Trackers
    display: StepDisplay
    plugins: Plugins
    config: Config
    run_dir: Path

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        """Step `step` is done: the `step`-th rollout of the run; `warnings` are the symptoms that are new."""
        self.display.show(self._record(step, metrics | {"memory_gb": memory_gb()}))
        for symptom in metrics.get("warnings", ()):
            self.display.warn(Warned(**symptom).text)
        self._tell_plugins(step, metrics)

    def evaluated(self, step: int, metrics: dict[str, Any]) -> None:
        """The held-out sets were evaluated after step `step`, 0 being before the first."""
        self.display.evaluated(self._record(step, metrics))
        self._tell_plugins(step, metrics)

    def _record(self, step: int, metrics: dict[str, Any]) -> dict[str, Any]:
        record = {"step": step, "time": time.time(), **metrics}
        self.metrics.write(record)
        self.trackers.write(record)
        return record

    def _tell_plugins(self, step: int, metrics: dict[str, Any]) -> None:
        for warning in self.plugins.step_end(step, metrics, self.config, self.run_dir):
            self.warn(f"{warning.message}: {warning.got}")

    def warn(self, message: str) -> None:
        """Show it, and keep it with the metrics."""
        self.display.warn(message)
        self.metrics.warn(message)

    def phase(self, name: str) -> None:
        self.display.phase(name)

    def status(self, text: str) -> None:
        self.display.status(text)


def open_trackers(
    plugins: Plugins, config: Config, run_dir: Path, done: int, display: StepDisplay, metrics: MetricsWriter
) -> Trackers:
    """What gets the metrics of every step besides their file. Raises EnvironmentFault: one of them cannot be opened."""
    known, names = plugins.trackers(), tracker_names(config.run)
    if names:
        display.status(f"opening {', '.join(names)}")

    def warn(message: str) -> None:
        display.warn(message)
        metrics.warn(message)

    return Trackers([known[name] for name in names], TrackedRun(run_dir, config_dump(config), done), warn)


def memory_gb() -> float:
    """Memory that this process and those it started have for themselves on this machine."""
    me = psutil.Process()
    used = 0
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.Error):
            memory = process.memory_info()
            used += memory.rss - getattr(memory, "shared", 0)
    return used / 1e9
