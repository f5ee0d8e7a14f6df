"""A stored step computed again with the installed code, and compared with what is stored.

Each stage starts from stored numbers, so that a difference stays in its stage. Numbers per token must be equal to the
bit. Losses and other means are compared with the step's metrics: they were summed micro-batch by micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from relax_cli.algorithms.kl import kl_estimate
from relax_cli.algorithms.masking import select
from relax_cli.algorithms.reduce import Mode, aggregate
from relax_cli.algorithms.value_loss import clipped_value_loss
from relax_cli.data.rewards import RewardInput, load_reward
from relax_cli.errors import RelaxError
from relax_cli.plugin.config_model import estimator_options, rebuild_config
from relax_cli.plugin.graph import TOKEN_REWARDS
from relax_cli.plugin.manager import Plugins
from relax_cli.plugin.records import EstimatorMath
from relax_cli.roles.actor import METRIC_NAMES, policy_loss_per_token
from relax_cli.roles.advantages import advantage_inputs, finished_advantages, kl_penalty
from relax_cli.roles.batching import Columns, plan_rows, stack, unpad
from relax_cli.roles.training import loss_denominator, masked_token_mean
from relax_cli.tracking.run_files import RunFolder, is_trainable

TOLERANCE = 1e-5
"""Relative, of means that were summed in another order."""
SMALLEST = 1e-7
"""Difference of such a mean that counts."""
PER_TOKEN = (
    "values", "advantages", "returns", "ref_log_probs", "old_log_probs", "train_log_probs", "train_values",
    TOKEN_REWARDS,
)  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """Where a recomputed number is another than the stored one."""

    stored: float | None
    recomputed: float | None
    row: int | None = None
    token: int | None = None
    metric: str | None = None


@dataclass(frozen=True)
class Stage:
    """One part of the step."""

    name: str
    status: Literal["same", "differs", "not replayed"]
    detail: str
    first: Difference | None = None


class NotReplayed(Exception):
    """What a stage needs is not stored."""


class Replay:
    """One step of a run, and the code that is installed now."""

    def __init__(self, run: RunFolder, step: int | None, plugins: Plugins) -> None:
        """Read the step.
        Raises ConfigError: it has no samples, or the configuration does not fit the installed code."""
        self.run = run
        self.config = rebuild_config(run.config)
        self.estimator = plugins.estimator(self.config.algorithm.advantage_estimator)
        self.options = estimator_options(self.config, self.estimator)
        self.rewards = {name: reward.function for name, reward in plugins.rewards().items()}
        self.step = max(run.steps(), default=0) if step is None else step
        self.samples = run.samples(self.step)
        self.rows = [int(sample["row"]) for sample in self.samples]
        self.metrics = next((record for record in run.metrics if record["step"] == self.step), {})
        self.math = EstimatorMath(self.estimator)
        self.columns = self._columns()

    def stages(self) -> Iterator[Stage]:
        """Every stage in the order of a step."""
        replays = {
            "rewards": self._rewards,
            "advantages": self._advantages,
            "value loss": self._value_loss,
            "policy loss": self._policy_loss,
        }
        for name, replay in replays.items():
            try:
                yield replay()
            except NotReplayed as reason:
                yield Stage(name, "not replayed", str(reason))
            except RelaxError as error:
                yield Stage(name, "not replayed", "; ".join(problem.message for problem in error.problems))

    def _columns(self) -> Columns:
        columns: Columns = {
            "response_lens": self._each(lambda s: torch.tensor(len(s["response_token_ids"]))),
            "response_mask": self._each(lambda s: torch.from_numpy(is_trainable(s).astype("int64"))),
            "rewards": self._each(lambda s: torch.tensor(s["reward"], dtype=torch.float32)),
            "group_ids": self._each(lambda s: torch.tensor(s["group"])),
            "truncated": self._each(lambda s: torch.tensor(int(s["finish_reason"] == "length"))),
        }
        stored = {name: name for name in PER_TOKEN} | {"rollout_log_probs": "log_probs"}
        for name, field in stored.items():
            if all(field in sample for sample in self.samples):
                columns[name] = self._each(lambda s, field=field: torch.from_numpy(s[field].copy()))  # type: ignore[misc]
        if all("bootstrap_values" in sample for sample in self.samples):
            columns["bootstrap_values"] = self._each(lambda s: torch.tensor(s["bootstrap_values"]))
        if self.config.algorithm.use_rollout_logprobs and "rollout_log_probs" in columns:
            columns["old_log_probs"] = columns["rollout_log_probs"]
        return columns

    def _each(self, value: Callable[[Any], Tensor]) -> dict[int, Tensor]:
        return {row: value(sample) for row, sample in zip(self.rows, self.samples, strict=True)}

    def _require(self, *names: str) -> None:
        """Refuse a stage without these columns, or with a part of the samples only."""
        expected = self.config.batch.samples_per_rollout
        if len(self.rows) != expected:
            raise NotReplayed(f"it needs all {expected} samples of the step, and {len(self.rows)} are stored")
        if missing := [name for name in names if name not in self.columns]:
            raise NotReplayed(f"not stored: {', '.join(missing)}")

    def _rewards(self) -> Stage:
        if any("turns" in sample for sample in self.samples):
            raise NotReplayed("rewards of an environment come with its turns")
        chat = self.config.data.apply_chat_template
        inputs = [
            RewardInput(
                prompt=self.run.token_texts.decode(sample["prompt_token_ids"]) if chat else sample["prompt"],
                response=sample["response"],
                label=sample["label"],
                metadata=dict(sample.get("metadata", {})),
                truncated=sample["finish_reason"] == "length",
                group=sample["group"],
            )
            for sample in self.samples
        ]
        reward = load_reward(self.config.reward, self.rewards)
        try:
            results = reward(inputs)
        finally:
            reward.close()
        wrong = [
            Difference(sample["reward"], result.reward, sample["row"])
            for sample, result in zip(self.samples, results, strict=True)
            if sample["reward"] != result.reward
        ]
        return _compared("rewards", wrong, len(results), "rewards")

    def _advantages(self) -> Stage:
        section, columns = self.config.algorithm, dict(self.columns)
        needed = ("values", "advantages", "returns") if self.estimator.needs_critic else ("advantages",)
        self._require(*needed)
        if section.kl_coef:
            old = "rollout_log_probs" if self.estimator.needs_critic else "old_log_probs"
            self._require(old, "ref_log_probs")
            columns["kl"] = kl_penalty(columns, self.rows, section.kl_coef, old=old)
        inputs = advantage_inputs(columns, self.rows, self.options)
        outputs = self.math.advantages(inputs)
        finished, metrics = finished_advantages(outputs.advantages, inputs, normalize=section.normalize_advantages)
        wrong = self._wrong_tokens("returns", outputs.returns) if outputs.returns is not None else []
        wrong = wrong or self._wrong_tokens("advantages", finished)
        tokens = int(sum(mask.sum() for mask in columns["response_mask"].values()))
        return _compared("advantages", wrong or self._wrong_metrics(metrics), tokens, "tokens (returns, whitening)")

    def _wrong_tokens(self, name: str, found_BT: Tensor) -> list[Difference]:
        """Trainable tokens whose number has other bits."""
        if name not in self.columns:
            return []
        wrong = []
        found = unpad(found_BT, self.rows, self.columns["response_lens"])
        for row in self.rows:
            stored, other = self.columns[name][row], found[row].float()
            differs = (stored.view(torch.int32) != other.view(torch.int32)) & (self.columns["response_mask"][row] != 0)
            wrong += [
                Difference(float(stored[i]), float(other[i]), row, i, name)
                for i in differs.nonzero().flatten().tolist()
            ]
        return wrong

    def _value_loss(self) -> Stage:
        if not self.estimator.needs_critic:
            raise NotReplayed("the run has no critic")
        if self.config.critic.critic_updates_per_step != 1:
            raise NotReplayed("values of later passes (--critic-updates-per-step) are not stored")
        self._require("train_values", "values", "returns")

        def step(rows: list[int], mask: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[dict[str, Tensor], Any]:
            terms = clipped_value_loss(
                self._grid("train_values", rows),
                self._grid("values", rows),
                self._grid("returns", rows),
                value_clip=self.config.critic.value_clip,
                mask=mask,
            )
            return {"value_loss": loss(terms.loss_per_token)}, terms.metrics

        return self._loss("value loss", step)

    def _policy_loss(self) -> Stage:
        section = self.config.algorithm
        if "pg_loss" not in self.metrics:
            raise NotReplayed("the actor did not learn in this step (--num-critic-only-steps)")
        names = ["train_log_probs", "old_log_probs", "rollout_log_probs", "advantages"]
        self._require(*names, *(["ref_log_probs"] if section.use_kl_loss else []))

        def step(rows: list[int], mask: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[dict[str, Tensor], Any]:
            fields = {name: self._grid(name, rows) for name in names}
            logp = fields["train_log_probs"]
            loss_BT, watched = policy_loss_per_token(self.math, self.options, section, logp, fields, mask)
            losses = {"pg_loss": loss(loss_BT)}
            if section.use_kl_loss:
                ref = select(self._grid("ref_log_probs", rows), mask)
                losses["kl_loss"] = loss(kl_estimate(select(logp, mask), ref, section.kl_loss_type))
            return losses, {METRIC_NAMES.get(name, name): value for name, value in watched.items()}

        return self._loss("policy loss", step)

    def _grid(self, name: str, rows: list[int]) -> Tensor:
        return stack(self.columns, name, rows, max(int(self.columns["response_lens"][row]) for row in rows))

    def _loss(self, name: str, step: Callable[..., tuple[dict[str, Tensor], dict[str, Tensor]]]) -> Stage:
        """The means over all optimizer steps of what `step` gives for each, against the metrics."""
        batch, records = self.config.batch, []
        kind = self.config.algorithm.aggregation(self.estimator.loss_aggregation)
        mode: Mode = "sample" if kind == "sample-mean" else "token"
        for positions in plan_rows([0] * len(self.rows), batch.steps_per_rollout, 1, 0):
            rows = sorted(self.rows[i] for i in positions)
            mask = self._grid("response_mask", rows) != 0
            tokens = float(mask.sum())
            denominator = loss_denominator(kind, batch, tokens, self.config.rollout.rollout_max_response_len)
            losses, watched = step(
                rows,
                mask,
                lambda loss, mask=mask, by=denominator: aggregate(loss, mask, mode=mode, denominator=by),
            )
            records.append(losses | {key: masked_token_mean(value, mask, tokens) for key, value in watched.items()})
        means = {key: sum(float(record[key]) for record in records) / len(records) for key in records[0]}
        return _compared(name, self._wrong_metrics(means), len(means), f"metrics ({', '.join(means)})")

    def _wrong_metrics(self, found: dict[str, float]) -> list[Difference]:
        wrong = []
        for name, value in found.items():
            stored = self.metrics.get(name, value)
            if stored is None or not math.isclose(stored, value, rel_tol=TOLERANCE, abs_tol=SMALLEST):
                wrong.append(Difference(stored, value, metric=name))
        return wrong


def _compared(name: str, wrong: list[Difference], count: int, what: str) -> Stage:
    if not wrong:
        return Stage(name, "same", f"{count} {what}")
    return Stage(name, "differs", f"{len(wrong)} of {count} {what} differ", wrong[0])
