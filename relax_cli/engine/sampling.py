"""Which prompts a rollout draws: the next ones of the data, or chosen by their past, or until enough have a signal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_cli.checkpoint.resume import ResumeReport
from relax_cli.checkpoint.sampling_state import Arrays, read_sampling, sampling_unreadable
from relax_cli.config.schema import Config
from relax_cli.data.curriculum import RowHistory, WeightedRows, load_curriculum
from relax_cli.engine.session import RolloutGroup
from relax_cli.plugin.records import Curriculum
from relax_cli.roles.carried import from_arrays, to_arrays
from relax_cli.roles.spread import Spread

if TYPE_CHECKING:
    from relax_cli.roles.pool import DrawnGroup

Shares = list[dict[str, Spread]]


class Sampling:
    """Every rollout draws `--rollout-batch-size` prompts and keeps all."""

    def generate(self, rollout: RolloutGroup, rollout_id: int) -> Shares:
        """The spreads of every worker's share, once the samples are queued; can be called again after a failure."""
        return rollout.generate(rollout_id)

    def finish(self) -> None:
        """The rollout has been trained on."""

    def position(self, rollout: RolloutGroup) -> dict[str, Any]:
        """Numbers, and arrays as `sampling`, that a checkpoint keeps besides the number of rollouts."""
        return {}


class DrawnSampling(Sampling):
    """Prompts are drawn in rounds, and the batch is chosen from them.

    With `--dynamic-sampling` groups whose rewards are all equal are dropped, and more prompts drawn, as DAPO does
    (arXiv:2503.14476). Each round draws `--over-sampling-batch-size` prompts. The batch is the first
    `--rollout-batch-size` groups whose rewards differ. After `--dynamic-sampling-max-rounds` rounds it is completed
    with groups of equal rewards. Otherwise there is one round, and all of it is the batch.

    Everything is counted by the place of a prompt among those drawn, so nothing depends on the number of workers.
    """

    def __init__(self, config: Config, drawn: int, curriculum: WeightedRows | None = None) -> None:
        """`drawn` prompts are those of all finished rollouts; without a curriculum the next ones of the data follow."""
        self.batch = config.batch
        self.size = config.prompts_per_round
        self.drawn = drawn
        self.curriculum = curriculum
        self.most_rounds = self.batch.dynamic_sampling_max_rounds if self.batch.dynamic_sampling else 1
        self._judged_now: list[tuple[int, DrawnGroup]] = []
        self._drawn_now = 0

    def generate(self, rollout: RolloutGroup, rollout_id: int) -> Shares:
        wanted, size = self.batch.rollout_batch_size, self.size
        drawn: list[tuple[int, DrawnGroup]] = []
        rounds = 0
        while rounds < self.most_rounds and sum(group.has_signal for _, group in drawn) < wanted:
            rows = self._rows(rollout, rollout_id, rounds * size, size)
            groups = rollout.draw(rollout_id, rounds * size, rows)
            drawn += [(rows[group.place - rounds * size], group) for group in groups]
            rounds += 1
        self._judged_now, self._drawn_now = drawn, len(drawn)
        with_signal = [group.place for _, group in drawn if group.has_signal]
        without = [group.place for _, group in drawn if not group.has_signal]
        chosen = with_signal[:wanted]
        filled = without[: wanted - len(chosen)]
        shares = rollout.keep(rollout_id, sorted(chosen + filled))
        counts = self._curriculum_metrics()
        if self.batch.dynamic_sampling:
            counts |= {
                "sampling/prompts": len(drawn),
                "sampling/rounds": rounds,
                "sampling/no_signal_frac": len(without) / len(drawn),
                "sampling/filled_frac": len(filled) / wanted,
                "sampling/response_tokens": sum(group.tokens for _, group in drawn),
            }
        return [*shares, {name: Spread.of([value]) for name, value in counts.items()}]

    def _rows(self, rollout: RolloutGroup, rollout_id: int, offset: int, count: int) -> list[int]:
        if self.curriculum is None:
            return rollout.places(self.drawn + offset, count)
        return self.curriculum.rows(rollout_id, offset, count)

    def _curriculum_metrics(self) -> dict[str, float]:
        if self.curriculum is None:
            return {}
        history = self.curriculum.history
        again = [row for row, _ in self._judged_now if history.visits[row]]
        past = Spread.of(history.reward[row] for row in again)
        return {
            "curriculum/effective_rows": self.curriculum.effective_rows,
            "curriculum/visited_frac": float((history.visits > 0).mean()),
            **({"curriculum/past_reward": past.mean} if again else {}),
        }

    def finish(self) -> None:
        self.drawn += self._drawn_now
        if self.curriculum is not None:
            visited = [(row, group.reward) for row, group in self._judged_now]
            self.curriculum.history = self.curriculum.history.after(visited)

    def position(self, rollout: RolloutGroup) -> dict[str, Any]:
        kept: dict[str, Any] = {"prompts_drawn": self.drawn} if self.batch.dynamic_sampling else {}
        if self.curriculum is not None:
            history = self.curriculum.history
            kept["sampling"] = {"curriculum_visits": history.visits, "curriculum_reward": history.reward}
        return kept


class PartialSampling(DrawnSampling):
    """With `--partial-rollout` a rollout ends once enough prompts are complete, and the others continue in the next.

    `--over-sampling-batch-size` prompts are in flight, and their responses grow by `--partial-rollout-len` at a
    time. After each part the complete prompts are counted. The batch is the first `--rollout-batch-size` of them in the
    order in which they were drawn; the others stay, finished or not. With `--dynamic-sampling` complete prompts of
    equal rewards are dropped, and new ones take their places.
    """

    def __init__(
        self, config: Config, drawn: int, curriculum: WeightedRows | None, in_flight: Sequence[tuple[int, int]]
    ) -> None:
        """`in_flight` are place and row of what was carried over."""
        super().__init__(config, drawn, curriculum)
        self.in_flight = list(in_flight)
        self._left: list[tuple[int, int]] = []

    def generate(self, rollout: RolloutGroup, rollout_id: int) -> Shares:
        wanted, most = self.batch.rollout_batch_size, self.most_rounds * self.size
        prompts, drawn, parts, tokens = list(self.in_flight), 0, 0, 0
        complete: list[DrawnGroup] = []
        dropped: list[DrawnGroup] = []
        while True:
            room = self.size - len(prompts) + len(dropped)
            # Without dynamic sampling what is complete stays in flight until it is chosen, so there is no room.
            count = max(0, min(room, most - drawn))
            rows = self._rows(rollout, rollout_id, drawn, count) if count else []
            begun = [(self.drawn + drawn + i, row) for i, row in enumerate(rows)]
            prompts, drawn = prompts + begun, drawn + count
            progress = rollout.advance(rollout_id, parts, begun)
            parts, tokens = parts + 1, tokens + sum(share.tokens for share in progress)
            groups = sorted((g for share in progress for g in share.complete), key=lambda group: group.place)
            dropped = [g for g in groups if self.batch.dynamic_sampling and not g.has_signal]
            complete = [g for g in groups if g not in dropped]
            can_begin = drawn < most and len(prompts) - len(dropped) < self.size
            if len(complete) >= wanted or (len(groups) == len(prompts) and not can_begin):
                break
        chosen = complete[:wanted]
        filled = dropped[: wanted - len(chosen)]
        row_of = dict(prompts)
        leaving = {group.place: group for group in [*chosen, *dropped]}
        self._judged_now = [(row_of[place], group) for place, group in sorted(leaving.items())]
        self._drawn_now = drawn
        self._left = [(place, row) for place, row in prompts if place not in leaving]
        shares = rollout.keep(rollout_id, sorted(g.place for g in [*chosen, *filled]), [g.place for g in dropped])
        counts = self._curriculum_metrics() | {
            "partial/parts": parts,
            "partial/carried_prompts": len(self._left),
            "sampling/prompts": drawn,
            "sampling/response_tokens": tokens,
        }
        if self.batch.dynamic_sampling:
            counts |= {
                "sampling/no_signal_frac": len(dropped) / len(groups),
                "sampling/filled_frac": len(filled) / wanted,
            }
        return [*shares, {name: Spread.of([value]) for name, value in counts.items()}]

    def finish(self) -> None:
        super().finish()
        self.in_flight = self._left

    def position(self, rollout: RolloutGroup) -> dict[str, Any]:
        kept = super().position(rollout)
        arrays = kept.get("sampling", {}) | to_arrays(rollout.carried())
        counts = {"prompts_in_flight": self.size, "carried_samples_per_prompt": self.batch.n_samples_per_prompt}
        return kept | counts | {"prompts_drawn": self.drawn, "sampling": arrays}


def sampling_of(
    config: Config, rollout: RolloutGroup, start: ResumeReport, curriculums: Mapping[str, Curriculum]
) -> Sampling:
    """How a run draws its prompts, continued from the checkpoint that it starts from.
    Raises ConfigError: the curriculum does not load. Raises ResumeError: what the checkpoint says of it is damaged."""
    batch, name, decision = config.batch, config.data.curriculum, start.decision
    if name is None and not batch.dynamic_sampling and not config.carries_over:
        return Sampling()
    first = decision.iteration or 0
    drawn = first * batch.rollout_batch_size if start.prompts_seen is None else start.prompts_seen
    folder = decision.actor.folder if first and decision.actor is not None else None
    saved: Arrays = {} if folder is None else read_sampling(folder)
    try:
        curriculum = None
        if name is not None:
            mixture = rollout.mixture()
            history = RowHistory.empty(sum(size for size, _ in mixture)).restored(saved)
            weigh = load_curriculum(name, curriculums)
            curriculum = WeightedRows(name, weigh, config.rollout.rollout_seed, history, mixture)
        if not config.carries_over:
            return DrawnSampling(config, drawn, curriculum)
        carried = from_arrays(saved, batch.n_samples_per_prompt)
    except (KeyError, ValueError) as error:
        raise sampling_unreadable(folder or Path(), str(error)) from error
    rollout.carry(carried)
    return PartialSampling(config, drawn, curriculum, [(group.place, group.row) for group in carried])
