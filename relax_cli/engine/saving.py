"""Saving actor and critic as a pair, so that at every instant the previous pair or the new one is complete.

    prepare   both write under temporary names; with `--async-save` a copy of the state, while training continues
    complete  both are written and get their final names
    publish   both trackers move; then checkpoints beyond `--keep-checkpoints` go

The loop writes the metrics and samples of all steps so far before the last: a resume finds them.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from relax_cli.checkpoint import folders, layout
from relax_cli.checkpoint.layout import Best
from relax_cli.config.schema import Config
from relax_cli.engine.session import TrainedGroup
from relax_cli.errors import ProcessLost, RunError

PATIENCE = 600.0
"""Seconds for which a run that has failed waits for a pair that is being written."""


class PairSaver:
    """Saves the trained roles of a run; without `--save` it does nothing."""

    def __init__(
        self, roles: list[TrainedGroup], config: Config, meta: dict[str, Any], *, warn: Callable[[str], None]
    ) -> None:
        """`meta` is what every checkpoint says about the run; `warn` shows what went wrong while it continues."""
        self.roles = roles
        self.section = config.checkpoint
        saves = {"actor": config.checkpoint.save, "critic": config.critic.critic_save}
        named = (saves[role.ranks.name] for role in roles)
        self.folders = [Path(folder) for folder in named if folder is not None and config.checkpoint.save is not None]
        self.meta = meta
        self.saved: int | None = None
        """Iteration of the newest pair of this run that counts."""
        self.good: int | None = None
        """Newest pair of this run whose policy was seen alive afterwards."""
        self.keeps_good = False
        """Whether `good` stays, however old: the policy has died since."""
        self.best: Best | None = None
        """What `--keep-best` keeps."""
        self.warn = warn
        self.pending: int | None = None
        """Iteration of a pair that is written or being written and does not count yet."""
        self._being_written = False

    def prepare(self, iteration: int, position: Mapping[str, Any] | None = None) -> None:
        """Write the pair of `iteration` with `Sampling.position`, or begin to; it does not count yet.
        Raises RunError: the disk refused and `--on-save-error` is `stop`; the previous pair counts."""
        assert self.pending is None, "one pair at a time"
        if self.section.save is None:
            return
        with self._undone_on_failure(iteration):
            # One name for both halves tells a pair from two checkpoints that only have the iteration in common.
            meta = {**self.meta, "save_id": uuid.uuid4().hex, **(position or {})}
            self.pending, self._being_written = iteration, self.section.async_save
            for role in self.roles:
                with role.awake():
                    (role.copy_checkpoint if self._being_written else role.write_checkpoint)(iteration, meta)
            if not self._being_written:
                self._commit()

    def _commit(self) -> None:
        assert self.pending is not None
        for folder in self.folders:
            folders.commit(folder, self.pending)
        self._being_written = False

    def _written(self) -> list[bool | None]:
        """Whether each half is written; None where the disk refused it."""
        assert self.pending is not None
        halves = [layout.temporary_folder(folder, self.pending) for folder in self.folders]
        return [(half / layout.META_FILE).exists() or (False if half.exists() else None) for half in halves]

    @property
    def is_written(self) -> bool:
        """Whether there is a pair whose roles have ended writing."""
        return self.pending is not None and not (self._being_written and False in self._written())

    def complete(self) -> None:
        """Wait until the pair is written, and give it its final names. Raises RunError: see `prepare`."""
        if self.pending is not None and self._being_written:
            with self._undone_on_failure(self.pending):
                wait_for_all([role.finish_checkpoint for role in self.roles])
                self._commit()

    def outlast(self) -> None:
        """`complete` after a failure: roles may not answer any more, but the files tell whether they have written.
        Raises RunError: the disk refused."""
        deadline = time.monotonic() + PATIENCE
        while self.pending is not None and not self.is_written and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.pending is not None and self._being_written:
            if all(self._written()):
                self._commit()
            else:
                self.pending = None

    def publish(self) -> None:
        """Let the completed pair count; does nothing when there is none. Raises RunError: see `prepare`."""
        iteration, self.pending = self.pending, None
        if iteration is None:
            return
        with self._undone_on_failure(iteration):
            for folder in self.folders:
                folders.publish(folder, iteration)
            self.saved = iteration
        if self.saved == iteration:
            self.rotate(iteration)

    def abandon(self) -> None:
        """Take back a pair that was prepared, since it shall not count."""
        if self.pending is not None:
            self._withdraw(self.pending)

    def take_over_best(self, done: int) -> None:
        """Continue with the best pair that a resumed run has in its folder, up to iteration `done`."""
        if self.section.save is not None and self.section.keep_best is not None:
            best = layout.read_best(Path(self.section.save))
            if best is not None and best.metric == self.section.keep_best and best.iteration <= done:
                self.best = best if self._is_there(best.iteration) else None

    def is_best(self, metrics: Mapping[str, Any]) -> bool:
        """Whether the metric of `--keep-best` is higher than ever."""
        value = metrics.get(self.section.keep_best or "")
        if self.section.save is None or value is None or not math.isfinite(value):
            return False
        return self.best is None or value > self.best.value

    def keep_best(self, iteration: int, metrics: Mapping[str, Any]) -> None:
        """The saved pair of `iteration` is the best from now on; does nothing where it is not saved."""
        assert self.section.keep_best is not None, "it is the best by a metric"
        if not self._is_there(iteration):
            return
        best = Best(self.section.keep_best, float(metrics[self.section.keep_best]), iteration)
        try:
            for folder in self.folders:
                folders.mark_best(folder, best)
        except RunError as error:
            self.warn(f"{best}, but it cannot be noted: {storage_failure(error)}")
        self.best = best
        self.rotate(iteration)

    def _is_there(self, iteration: int) -> bool:
        return layout.is_complete(layout.iteration_folder(Path(self.section.save or ""), iteration))

    def rotate(self, current: int) -> None:
        """Drop what is too old; the new pair counts already, so a disk that refuses this ends nothing."""
        if self.section.save is None:
            return
        kept = {self.good if self.keeps_good else None, self.best.iteration if self.best else None} - {None}
        try:
            for folder in self.folders:
                folders.rotate(folder, current, self.section.keep_checkpoints, [i for i in kept if i is not None])
        except RunError as error:
            self.warn(f"old checkpoints could not be removed: {storage_failure(error)}")

    @contextmanager
    def _undone_on_failure(self, iteration: int) -> Iterator[None]:
        try:
            yield
        except RunError as error:
            reason = storage_failure(error)
            self._withdraw(iteration)
            if self.section.on_save_error == "stop":
                raise
            self.warn(
                f"iteration {iteration} is not saved: {reason}; the previous pair still counts, the run continues"
            )

    def _withdraw(self, iteration: int) -> None:
        if self._being_written:
            with suppress(RunError):
                wait_for_all([role.finish_checkpoint for role in self.roles])
        self.pending, self._being_written = None, False
        for folder in self.folders:
            try:
                folders.withdraw(folder, iteration)
            except RunError as error:
                self.warn(f"what was written of iteration {iteration} could not be removed: {storage_failure(error)}")


def wait_for_all(waits: Sequence[Callable[[], object]]) -> None:
    """Wait for all roles, also after one has failed: what is being written cannot be taken back.
    Raises RelaxError: the first failure."""
    failures: list[RunError] = []
    for wait in waits:
        try:
            wait()
        except ProcessLost:
            raise
        except RunError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def storage_failure(error: RunError) -> str:
    """What the disk said. Raises RunError: `error` itself, when it is about something else than a disk."""
    (problem,) = error.problems
    if problem.id != "storage-failed":
        raise error
    return f"{problem.message} ({problem.where})"
