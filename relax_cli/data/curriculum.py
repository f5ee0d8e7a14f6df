"""`--curriculum NAME|FILE.py:function`: which rows a rollout draws, by how well each went before.

Legend: `N` rows of the training data. numpy is imported where it is used: checking a configuration has no use for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relax_cli.errors import ConfigError, RunError, problem_kind
from relax_cli.plugin.records import Curriculum
from relax_cli.plugin.user_code import UserCodeError, settings_kept, user_code
from relax_cli.plugin.user_file import UserFile, accepts, is_file_spec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EXPECTED = "FILE.py:function, which takes a RowHistory and returns a weight for each row"
FAILED = problem_kind(
    "curriculum-failed",
    "Data",
    "The curriculum fails to import, raises an exception, or does not return one weight for each row: finite, not "
    "negative, and not all 0. A file's is tried on four rows before the launch.",
    option="--curriculum",
)
USER_FILE = UserFile(
    "curriculum", "curriculum", FAILED, "function", "curriculum.py:weights", EXPECTED,
    tried_by=f"{__name__}:try_curriculum",
    nowhere="There is no built-in curriculum of that name, nor one of a plugin.",
)  # fmt: skip

REMEMBERED = 4
"""Visits that the mean reward of a row is about of: the policy changes, and old rewards with it."""
FLOOR = 0.1
"""Least weight of a row under `learnability`, so that every row is visited again."""
SECONDS = 120.0
"""Deadline of a curriculum's call."""


@dataclass(frozen=True)
class RowHistory:
    """What a run knows of its rows."""

    visits: NDArray[np.int64]
    """`[N]`, how often the row was sampled."""
    reward: NDArray[np.float64]
    """`[N]`, mean reward of its samples: of all visits up to the fourth, of which each later one replaces a quarter.
    0 where there was no visit."""

    @classmethod
    def empty(cls, rows: int) -> RowHistory:
        """Before the first step."""
        import numpy as np

        return cls(np.zeros(rows, np.int64), np.zeros(rows))

    def after(self, visited: Sequence[tuple[int, float]]) -> RowHistory:
        """The history with further visits, each a row and the mean reward of its samples."""
        visits, reward = self.visits.copy(), self.reward.copy()
        for row, mean in visited:
            visits[row] += 1
            reward[row] += (mean - reward[row]) / min(int(visits[row]), REMEMBERED)
        return RowHistory(visits, reward)

    def restored(self, saved: Mapping[str, NDArray[Any]]) -> RowHistory:
        """The history that was saved as `curriculum_visits` and `curriculum_reward`; this one where there is none.
        Raises ValueError: it is of other rows."""
        if "curriculum_visits" not in saved:
            return self
        found = RowHistory(saved["curriculum_visits"], saved["curriculum_reward"])
        for mine, its in ((self.visits, found.visits), (self.reward, found.reward)):
            if (mine.shape, mine.dtype) != (its.shape, its.dtype):
                raise ValueError(f"the past of {len(its)} rows instead of {len(mine)}")
        return found


Weigh = Callable[[RowHistory], Any]


def learnability(history: RowHistory) -> NDArray[np.float64]:
    """p(1 - p) of a row's success rate p: rows that the policy solves half of the time come most often."""
    import numpy as np

    p = np.clip(history.reward, 0.0, 1.0)
    return np.where(history.visits == 0, 1.0, FLOOR + (1.0 - FLOOR) * 4.0 * p * (1.0 - p))


class WeightedRows:
    """Draws rows without repetition, each as likely as its weight says; a function of seed, rollout and history."""

    def __init__(
        self, name: str, weigh: Weigh, seed: int, history: RowHistory, mixture: Sequence[tuple[int, float]] = ()
    ) -> None:
        """`mixture`: size and weight of each set; a set keeps its share, and its own rows compete for it."""
        self.name = name
        self.history = history
        self._weigh = weigh
        self._seed = seed
        self._mixture = mixture
        self._order: tuple[int, list[int]] = (-1, [])
        self.effective_rows = 0.0
        """`(sum w)² / sum w²` of the newest weights: as many rows with equal weights would be as varied."""

    def rows(self, rollout_id: int, offset: int, count: int) -> list[int]:
        """`count` rows of a rollout that has drawn `offset` before. Raises RunError: the curriculum failed."""
        if self._order[0] != rollout_id:
            self._order = (rollout_id, self._ordered(rollout_id))
        order = self._order[1]
        return [order[place % len(order)] for place in range(offset, offset + count)]

    def _ordered(self, rollout_id: int) -> list[int]:
        """All rows in the order in which a weighted draw without repetition takes them (Efraimidis & Spirakis 2006)."""
        import numpy as np

        weights = weights_of(self.name, self._weigh, self.history)
        first, total = 0, sum(weight for _, weight in self._mixture)
        for size, weight in self._mixture:
            own = weights[first : first + size]
            own *= weight / total / max(own.sum(), np.finfo(float).tiny)
            first += size
        self.effective_rows = float(weights.sum() ** 2 / (weights**2).sum())
        # Over its versions numpy keeps the raw bits of a seed, but not what `Generator` makes of them.
        raw = np.random.PCG64(np.random.SeedSequence([self._seed, rollout_id, 0])).random_raw(len(weights))
        uniform = ((raw >> np.uint64(11)) + 0.5) * 2.0**-53
        with np.errstate(divide="ignore", over="ignore"):
            order: list[int] = np.argsort(-np.log(uniform) / weights, kind="stable").tolist()
        return order


def weights_of(name: str, weigh: Weigh, history: RowHistory) -> NDArray[np.float64]:
    """The weights of all rows, once they are what they have to be.
    Raises RunError: the function failed, or what it returned are no weights."""
    import numpy as np

    fault = where = ""
    try:
        with user_code(passes=(), seconds=SECONDS), settings_kept():
            # A copy, for it may change what it is given.
            weights = np.array(weigh(history.after([])), dtype=np.float64)
    except UserCodeError as error:
        fault, where = error.story, error.place
    else:
        if weights.shape != history.reward.shape:
            fault = f"shape {weights.shape} for {len(history.reward)} rows"
        elif not np.isfinite(weights).all() or (weights < 0).any():
            row = int(np.argmin(np.isfinite(weights) & (weights >= 0)))
            fault = f"weight {weights[row]} of row {row}"
        elif not weights.any():
            fault = "all weights are 0"
    if fault:
        what = f"the curriculum {name} gave no weights"
        raise RunError(FAILED(what, where=where, got=fault, expected=EXPECTED, fix=f"correct {name}"))
    return weights


def load_curriculum(spec: str, named: Mapping[str, Curriculum]) -> Weigh:
    """The function of `--curriculum`: `FILE.py:function`, or one that has a name.
    Raises ConfigError: there is none, or it does not load."""
    if not is_file_spec(spec):
        if spec not in named:
            raise ConfigError(USER_FILE.unknown(spec, named))
        return named[spec].load()
    target: Weigh = USER_FILE.find(spec, inspect.isfunction)
    if not accepts(target, None):
        raise USER_FILE.unfit(spec, "be called with a history", target)
    return target


def try_curriculum(spec: str) -> None:
    """Call the function of `FILE.py:function` once: before a launch, in a process of its own.
    Raises RelaxError: what is wrong with it."""
    tried = RowHistory.empty(4).after([(1, 0.5), (2, 1.0), (2, 0.0), (3, 1.0)])
    weights_of(spec, load_curriculum(spec, {}), tried)
