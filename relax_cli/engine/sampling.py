"""Which prompts a rollout draws: a fixed number, or more of them until enough groups of samples have a signal."""

from __future__ import annotations

from relax_cli.config.schema import BatchSection
from relax_cli.engine.groups import RolloutGroup
from relax_cli.roles.spread import Spread

Shares = list[dict[str, Spread]]


class Sampling:
    """Every rollout draws `--rollout-batch-size` prompts and keeps all."""

    drawn: int | None = None
    """Prompts that all finished rollouts have drawn; None where it follows from their number."""

    def generate(self, rollout: RolloutGroup, rollout_id: int) -> Shares:
        """The spreads of every worker's share, once the samples are in the queue."""
        return rollout.generate(rollout_id)

    def generate_missing(self, rollout: RolloutGroup, rollout_id: int) -> Shares:
        """After a server has died: as `generate`, but what other workers sampled is kept."""
        return rollout.generate_missing(rollout_id)

    def finish(self) -> None:
        """The rollout has been trained on."""


class DynamicSampling(Sampling):
    """Groups whose rewards are all equal are dropped, and more prompts drawn, as DAPO does (arXiv:2503.14476).

    Each round draws `--over-sampling-batch-size` prompts, in the order of the data. The batch is the first
    `--rollout-batch-size` groups whose rewards differ. After `--dynamic-sampling-max-rounds` rounds it is completed
    with groups of equal rewards. Everything is counted by the place of a prompt among those drawn, so nothing
    depends on the number of workers.
    """

    def __init__(self, batch: BatchSection, drawn: int) -> None:
        self.batch = batch
        self.drawn: int = drawn
        self._drawn_now = 0

    def generate(self, rollout: RolloutGroup, rollout_id: int) -> Shares:
        """See `Sampling`; workers keep what they have sampled of a rollout, so it can be called again."""
        wanted, size = self.batch.rollout_batch_size, self.batch.prompts_per_round
        with_signal: list[int] = []
        without: list[int] = []
        tokens = rounds = 0
        while rounds < self.batch.dynamic_sampling_max_rounds and len(with_signal) < wanted:
            for group in rollout.draw(rollout_id, rounds * size, self.drawn + rounds * size, size):
                (with_signal if group.has_signal else without).append(group.place)
                tokens += group.tokens
            rounds += 1
        chosen = with_signal[:wanted]
        filled = without[: wanted - len(chosen)]
        self._drawn_now = rounds * size
        shares = rollout.keep(rollout_id, sorted(chosen + filled))
        counts = {
            "prompts": self._drawn_now,
            "rounds": rounds,
            "no_signal_frac": len(without) / self._drawn_now,
            "filled_frac": len(filled) / wanted,
            "response_tokens": tokens,
        }
        return [*shares, {f"sampling/{name}": Spread.of([value]) for name, value in counts.items()}]

    generate_missing = generate

    def finish(self) -> None:
        """See `Sampling`."""
        self.drawn += self._drawn_now


def sampling_of(batch: BatchSection, first: int, drawn: int | None) -> Sampling:
    """How a run that has finished `first` rollouts draws its prompts.

    Args:
        drawn: prompts that they have drawn; None where each drew `--rollout-batch-size`.
    """
    if not batch.dynamic_sampling:
        return Sampling()
    return DynamicSampling(batch, first * batch.rollout_batch_size if drawn is None else drawn)
