"""Which prompts a rollout draws: the next ones of the data, or chosen by their past, or until enough have a signal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from relax_cli.checkpoint.resume import ResumeReport
from relax_cli.checkpoint.sampling_state import read_sampling, sampling_unreadable
from relax_cli.config.schema import BatchSection, Config
from relax_cli.data.curriculum import RowHistory, WeightedRows, load_curriculum
from relax_cli.engine.groups import RolloutGroup
from relax_cli.plugin.records import Curriculum
from relax_cli.roles.spread import Spread

if TYPE_CHECKING:
    from relax_cli.roles.drawing import DrawnGroup

Shares = list[dict[str, Spread]]


class Sampling:
    """Every rollout draws `--rollout-batch-size` prompts and keeps all."""

    def generate(self, rollout: RolloutGroup, rollout_id: int) -> Shares:
        """The spreads of every worker's share, once the samples are in the queue."""
        return rollout.generate(rollout_id)

    def generate_missing(self, rollout: RolloutGroup, rollout_id: int) -> Shares:
        """After a server has died: as `generate`, but what other workers sampled is kept."""
        return rollout.generate_missing(rollout_id)

    def finish(self) -> None:
        """The rollout has been trained on."""

    def position(self) -> dict[str, Any]:
        """What a checkpoint keeps of the sampling, where it does not follow from the number of rollouts.

        `prompts_drawn` is a number, `sampling` has arrays.
        """
        return {}


class DrawnSampling(Sampling):
    """Prompts are drawn in rounds, and the batch is chosen from them.

    With `--dynamic-sampling` groups whose rewards are all equal are dropped, and more prompts drawn, as DAPO does
    (arXiv:2503.14476). Each round draws `--over-sampling-batch-size` prompts. The batch is the first
    `--rollout-batch-size` groups whose rewards differ. After `--dynamic-sampling-max-rounds` rounds it is completed
    with groups of equal rewards. Otherwise there is one round, and all of it is the batch.

    Everything is counted by the place of a prompt among those drawn, so nothing depends on the number of workers.
    """

    def __init__(self, batch: BatchSection, drawn: int, curriculum: WeightedRows | None = None) -> None:
        """Args:
        drawn: prompts that all finished rollouts have drawn.
        curriculum: chooses the rows; without it they are the next ones of the data.
        """
        self.batch = batch
        self.drawn = drawn
        self.curriculum = curriculum
        self._drawn_now: list[tuple[int, DrawnGroup]] = []

    def generate(self, rollout: RolloutGroup, rollout_id: int) -> Shares:
        """See `Sampling`; workers keep what they have sampled of a rollout, so it can be called again."""
        wanted, size = self.batch.rollout_batch_size, self.batch.prompts_per_round
        most_rounds = self.batch.dynamic_sampling_max_rounds if self.batch.dynamic_sampling else 1
        drawn: list[tuple[int, DrawnGroup]] = []
        rounds = 0
        while rounds < most_rounds and sum(group.has_signal for _, group in drawn) < wanted:
            rows = self._rows(rollout, rollout_id, rounds * size, size)
            groups = rollout.draw(rollout_id, rounds * size, rows)
            drawn += [(rows[group.place - rounds * size], group) for group in groups]
            rounds += 1
        self._drawn_now = drawn
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

    generate_missing = generate

    def _rows(self, rollout: RolloutGroup, rollout_id: int, offset: int, count: int) -> list[int]:
        if self.curriculum is None:
            return rollout.places(self.drawn + offset, count)
        return self.curriculum.rows(rollout_id, offset, count)

    def _curriculum_metrics(self) -> dict[str, float]:
        if self.curriculum is None:
            return {}
        history = self.curriculum.history
        again = [row for row, _ in self._drawn_now if history.visits[row]]
        past = Spread.of(history.reward[row] for row in again)
        return {
            "curriculum/effective_rows": self.curriculum.effective_rows,
            "curriculum/visited_frac": float((history.visits > 0).mean()),
            **({"curriculum/past_reward": past.mean} if again else {}),
        }

    def finish(self) -> None:
        """See `Sampling`."""
        self.drawn += len(self._drawn_now)
        if self.curriculum is not None:
            visited = [(row, group.reward) for row, group in self._drawn_now]
            self.curriculum.history = self.curriculum.history.after(visited)

    def position(self) -> dict[str, Any]:
        """See `Sampling`."""
        kept: dict[str, Any] = {"prompts_drawn": self.drawn} if self.batch.dynamic_sampling else {}
        if self.curriculum is not None:
            history = self.curriculum.history
            kept["sampling"] = {"curriculum_visits": history.visits, "curriculum_reward": history.reward}
        return kept


def sampling_of(
    config: Config, rollout: RolloutGroup, start: ResumeReport, curriculums: Mapping[str, Curriculum]
) -> Sampling:
    """How a run draws its prompts, continued from the checkpoint that it starts from.

    Args:
        curriculums: those that have a name.

    Raises:
        ConfigError: the curriculum does not load.
        ResumeError: what the checkpoint says of it is damaged.
    """
    batch, name, decision = config.batch, config.data.curriculum, start.decision
    if name is None and not batch.dynamic_sampling:
        return Sampling()
    first = decision.iteration or 0
    drawn = first * batch.rollout_batch_size if start.prompts_seen is None else start.prompts_seen
    if name is None:
        return DrawnSampling(batch, drawn)
    mixture = rollout.mixture()
    history = RowHistory.empty(sum(size for size, _ in mixture))
    if first and decision.actor is not None:
        folder = decision.actor.folder
        saved = read_sampling(folder)
        if "curriculum_visits" in saved:
            found = RowHistory(saved["curriculum_visits"], saved.get("curriculum_reward", history.reward[:0]))
            if found.is_like(history):
                history = found
            else:
                got = f"{len(found.visits)} rows"
                raise sampling_unreadable(folder, got, f"the past of {len(history.visits)} rows")
    weigh = load_curriculum(name, curriculums)
    curriculum = WeightedRows(name, weigh, config.rollout.rollout_seed, history, mixture)
    return DrawnSampling(batch, drawn, curriculum)
