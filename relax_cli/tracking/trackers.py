"""Writers of the built-in trackers, and what keeps a run going when one of them fails."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from relax_cli.errors import EnvironmentFault, problem_kind
from relax_cli.plugin.trackers import TrackedRun, Tracker, TrackerWriter
from relax_cli.plugin.user_code import UserCodeError, user_code

SECONDS = 300.0
"""Deadline of one call of a tracker, which may wait for a server."""
_mlflow_name = partial(re.sub, r"[^\w./: -]", "_")
"""`pass@1` is not a name that MLflow takes."""
MLFLOW_TAGS = 100
"""Most that MLflow takes at once."""
TRACKER_FAILED = problem_kind(
    "tracker-failed",
    "Trackers",
    "A tracker of `--track` cannot be opened; nothing was launched. One that fails later is left out with a warning.",
    option="--track",
)


class Trackers:
    """The trackers of a run. One that fails is left out from then on, with one warning."""

    def __init__(self, chosen: Iterable[Tracker], run: TrackedRun, warn: Callable[[str], None]) -> None:
        """Open them. Raises EnvironmentFault: one of them cannot be opened."""
        self._warn = warn
        self._writers: dict[str, TrackerWriter] = {}
        for tracker in chosen:
            try:
                with user_code(seconds=SECONDS):
                    self._writers[tracker.name] = tracker.load()(run)
            except UserCodeError as error:
                raise EnvironmentFault(
                    TRACKER_FAILED(
                        f"the tracker {tracker.name} cannot be opened",
                        where=error.place,
                        got=error.story,
                        fix=f"drop --track {tracker.name}, or see what it says",
                    )
                ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Give every tracker a step's record, or an evaluation."""
        for name, writer in list(self._writers.items()):
            with self._left_out_on_failure(name):
                writer.write(dict(record))

    def close(self, summary: Mapping[str, Any]) -> None:
        """Tell every tracker that the run ended; does nothing the second time."""
        while self._writers:
            name, writer = self._writers.popitem()
            with self._left_out_on_failure(name):
                writer.close(summary)

    @contextmanager
    def _left_out_on_failure(self, name: str) -> Iterator[None]:
        try:
            with user_code(passes=(), seconds=SECONDS):
                yield
        except UserCodeError as error:
            self._writers.pop(name, None)
            self._warn(f"the tracker {name} failed, the run continues without it: {error.story}")


def numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number of a record but its step and time; numbers of nested objects as `outer/inner`."""
    for name, value in _flat(record, "/"):
        if isinstance(value, int | float) and name not in ("step", "time"):
            yield name, float(value)


class TensorBoard:
    """Scalars in `tb/`."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.run_dir / "tb"), purge_step=run.done + 1 if run.done else None)
        self._add_text("config", run.config)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in numbers(record):
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self, summary: Mapping[str, Any]) -> None:
        self._add_text("summary", summary)
        self._writer.close()

    def _add_text(self, name: str, values: Mapping[str, Any]) -> None:
        self._writer.add_text(name, "\n".join(f"    {key}: {value}" for key, value in _flat(values)))


class Wandb:
    """A run of Weights & Biases."""

    def __init__(self, run: TrackedRun) -> None:
        library: Any = import_module("wandb")
        settings = library.setup(library.Settings(console="off", silent=True)).settings
        # It would wait at a prompt that nobody sees.
        if settings.mode not in ("offline", "disabled", "dryrun") and not library.login(prompt=False):
            raise RuntimeError("not logged in: `wandb login`, WANDB_API_KEY, or WANDB_MODE=offline")
        self._run: Any = library.init(
            project=settings.project or "relax",
            name=run.name,
            id=run.kept("wandb", lambda: uuid.uuid4().hex[:12]),
            resume="allow",
            dir=str(run.run_dir),
            config=dict(run.config),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Mapping[str, Any]) -> None:
        # As a metric, not as wandb's own counter, which refuses the steps that a resumed run does again.
        self._run.log({"step": record["step"], **dict(numbers(record))})

    def close(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(_flat(summary)))
        self._run.finish()


class Trackio:
    """A run of Trackio in the project `relax`."""

    def __init__(self, run: TrackedRun) -> None:
        library: Any = import_module("trackio")
        self._run: Any = library.init(
            project="relax", name=run.name, config=dict(_flat(run.config)), resume="allow", embed=False
        )

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log(dict(numbers(record)), step=record["step"])

    def close(self, summary: Mapping[str, Any]) -> None:
        self._run.log({f"summary/{name}": value for name, value in numbers(summary)})
        self._run.finish()


class MLflow:
    """A run in the store of `MLFLOW_TRACKING_URI`."""

    def __init__(self, run: TrackedRun) -> None:
        self._client: Any = import_module("mlflow").MlflowClient()

        def new() -> str:
            found = self._client.get_experiment_by_name("relax")
            experiment = self._client.create_experiment("relax") if found is None else found.experiment_id
            return str(self._client.create_run(experiment, run_name=run.name).info.run_id)

        self._id = run.kept("mlflow", new)
        self._client.update_run(self._id, status="RUNNING")
        # Tags: parameters of MLflow cannot change when a run is resumed with another value.
        self._tag("config", run.config)

    def write(self, record: Mapping[str, Any]) -> None:
        entity = import_module("mlflow.entities").Metric
        stamp = int(record["time"] * 1000)
        metrics = [entity(_mlflow_name(name), value, stamp, record["step"]) for name, value in numbers(record)]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, summary: Mapping[str, Any]) -> None:
        self._tag("summary", {_mlflow_name(name): value for name, value in summary.items()})
        self._client.set_terminated(self._id, "FINISHED" if summary.get("ok") else "FAILED")

    def _tag(self, prefix: str, values: Mapping[str, Any]) -> None:
        entity = import_module("mlflow.entities").RunTag
        tags = [entity(f"{prefix}.{name}", str(value)[:5000]) for name, value in _flat(values)]
        for start in range(0, len(tags), MLFLOW_TAGS):
            self._client.log_batch(self._id, tags=tags[start : start + MLFLOW_TAGS])


def _flat(values: Mapping[str, Any], separator: str = ".") -> Iterator[tuple[str, Any]]:
    """`section.option` to a value that every tracker takes."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}{separator}{inner}", found) for inner, found in _flat(value, separator))
        else:
            yield name, value if isinstance(value, str | int | float) else str(value)
