"""Saving actor and critic as a pair, so that at every instant the previous pair or the new one is complete.

    prepare   both write under temporary names, then both get their final names
    publish   both trackers move; then checkpoints beyond `--keep-checkpoints` go

The loop writes the step's metrics between the two: a resume finds the metrics of every step before it.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relax_cli.checkpoint import layout
from relax_cli.checkpoint.layout import Best
from relax_cli.config.schema import CheckpointSection
from relax_cli.engine.groups import TrainedGroup
from relax_cli.errors import RunError


class PairSaver:
    """Saves the trained roles of a run; without `--save` it does nothing."""

    def __init__(
        self,
        roles: list[TrainedGroup],
        section: CheckpointSection,
        meta: dict[str, Any],
        *,
        warn: Callable[[str], None],
    ) -> None:
        """Save nothing yet.

        Args:
            meta: what every checkpoint says about the run.
            warn: shows what went wrong while the run continues.
        """
        self.roles = roles
        self.section = section
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
        self._prepared: int | None = None

    def prepare(self, iteration: int, position: Mapping[str, Any] | None = None) -> None:
        """Write the pair of `iteration`; it does not count yet.

        Args:
            position: see `Sampling.position`.

        Raises:
            RunError: the disk refused and `--on-save-error` is `stop`; the previous pair counts.
        """
        if self.section.save is None:
            return
        with self._undone_on_failure(iteration):
            # One name for both halves tells a pair from two checkpoints that only have the iteration in common.
            meta = {**self.meta, "save_id": uuid.uuid4().hex, **(position or {})}
            for role in self.roles:
                with role.awake():
                    role.write_checkpoint(iteration, meta)
            for role in self.roles:
                role.commit_checkpoint(iteration)
            self._prepared = iteration

    @property
    def is_prepared(self) -> bool:
        """Whether a pair is written that does not count yet."""
        return self._prepared is not None

    def publish(self) -> None:
        """Let the pair that was prepared count; does nothing when there is none.

        Raises:
            RunError: see `prepare`.
        """
        iteration, self._prepared = self._prepared, None
        if iteration is None:
            return
        with self._undone_on_failure(iteration):
            for role in self.roles:
                role.publish_checkpoint(iteration)
            self.saved = iteration
        if self.saved == iteration:
            self.rotate(iteration)

    def abandon(self) -> None:
        """Take back a pair that was prepared, since it shall not count."""
        if self._prepared is not None:
            self._withdraw(self._prepared)
            self._prepared = None

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
            for role in self.roles:
                role.mark_best(best)
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
            for role in self.roles:
                role.rotate_checkpoints(current, self.section.keep_checkpoints, [i for i in kept if i is not None])
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
        for role in self.roles:
            try:
                role.withdraw_checkpoint(iteration)
            except RunError as error:
                self.warn(f"what was written of iteration {iteration} could not be removed: {storage_failure(error)}")


def storage_failure(error: RunError) -> str:
    """What the disk said.

    Raises:
        RunError: `error` itself, when it is about something else than a disk.
    """
    (problem,) = error.problems
    if problem.id != "storage-failed":
        raise error
    return f"{problem.message} ({problem.where})"
