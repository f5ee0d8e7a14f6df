"""Rollout: generates responses with the engine, has them judged, and writes the samples to the queue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from relax_cli.backends.rollout.protocol import LoadingEngine, Request, RolloutEngine, SamplingParams, ServerEngine
from relax_cli.backends.rollout.targets import WeightTarget
from relax_cli.data.order import PromptOrder
from relax_cli.data.prompts import Prompt, Prompts
from relax_cli.data.rewards import RewardFunction
from relax_cli.data.tokenise import encode_prompt, prompt_too_long
from relax_cli.errors import ConfigError
from relax_cli.roles.context import RoleContext
from relax_cli.roles.evaluation import Outcome
from relax_cli.roles.judging import Judge, Judged, Sampled, reward_spreads
from relax_cli.roles.sample_files import SampleWriter
from relax_cli.roles.spread import Spread

EVAL_STREAM = 1 << 40
"""Stands for the rollout id in the seeds of held-out samples, so that every evaluation draws the same noise."""


class RolloutRole:
    """One generation worker; worker `rank` of `workers` takes its slice of every rollout's prompts."""

    name = "rollout"

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        reward: RewardFunction,
        sampling: SamplingParams,
        prompts: Sequence[Prompt],
        eval_prompts: dict[str, Sequence[Prompt]],
        context: RoleContext,
    ) -> None:
        config = context.config
        self.engine = engine
        self.tokenizer = tokenizer
        self.judge = Judge(
            reward,
            tokenizer,
            sampling.stop,
            apply_chat_template=config.data.apply_chat_template,
            trace_file=context.run_dir / "logs" / f"reward-{context.rank}.txt",
        )
        self.sampling = sampling
        self.prompts = prompts
        self.eval_prompts = eval_prompts
        self.queue = context.queue
        self.data = config.data
        self.batch = config.batch
        self.rollout = config.rollout
        self.eval_samples = config.eval.n_samples_per_eval_prompt
        self.rank = context.rank
        self.workers = context.ranks
        mixture = prompts.mixture if isinstance(prompts, Prompts) else ()
        self.order = PromptOrder(len(prompts), self.rollout.rollout_seed, self.data.shuffle, mixture)
        self.writer = SampleWriter(context.run_dir)
        self.eval_writer = SampleWriter(context.run_dir, "evals")
        self.awake = True
        self.has_weights = True
        self.judged: list[Judged] = []
        self.evaluated: tuple[str, list[Judged]] = ("", [])
        self.written: tuple[int, dict[str, Spread]] | None = None

    def wake_for_weights(self) -> None:
        """Give the servers the memory of their weights back, but not yet that of their caches."""
        if not self.has_weights:
            self._servers.wake_for_weights()
            self.has_weights = True

    def wake(self) -> None:
        """Give the engine its memory back."""
        if not self.awake:
            self.engine.wake()
            self.awake = self.has_weights = True

    def sleep(self) -> None:
        """Leave the device to the other roles."""
        if self.awake or self.has_weights:
            self.engine.sleep()
            self.awake = self.has_weights = False

    def revive(self) -> int:
        """Start servers of this worker again that have ended; how many. Everything sleeps then and needs weights."""
        revived = self._servers.revive()
        self.awake = self.has_weights = False
        return revived

    def weight_targets(self) -> list[WeightTarget]:
        """Servers that the actor sends its weights to; none where they come through `load_weights`."""
        return list(self.engine.targets) if isinstance(self.engine, ServerEngine) else []

    def weights_updated(self, version: int) -> None:
        """The actor has sent the weights `version` to every target."""
        self._servers.weights_updated(version)

    def load_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the engine's weights by the actor's."""
        assert isinstance(self.engine, LoadingEngine), "weights are sent to the engine's servers"
        self.engine.load_weights(named, version)

    @property
    def _servers(self) -> ServerEngine:
        assert isinstance(self.engine, ServerEngine), "the engine has no servers"
        return self.engine

    def generate(self, rollout_id: int) -> dict[str, Spread]:
        """Sample this worker's share of rollout `rollout_id` and write it to the queue."""
        assert self.awake, "rollout generates only while awake"
        chosen = self.order.rows(rollout_id, self.batch.rollout_batch_size)
        self.judged = self._sample(
            [self.prompts[i] for i in chosen], self.batch.n_samples_per_prompt, stream=rollout_id
        )
        if self.judged:
            self._put(rollout_id)
        self.written = (rollout_id, self._spreads())
        return self.written[1]

    def generate_missing(self, rollout_id: int) -> dict[str, Spread]:
        """After the failure of another worker: as `generate`, but what this one has written is kept."""
        if self.written is not None and self.written[0] == rollout_id:
            return self.written[1]
        return self.generate(rollout_id)

    def _spreads(self) -> dict[str, Spread]:
        return {
            **reward_spreads(self.judged),
            "response_len": Spread.of(len(j.generation.tokens) for j in self.judged),
            "prompt_len": Spread.of(len(j.prompt_tokens) for j in self.judged),
            "truncated": Spread.of(j.generation.finish_reason == "length" for j in self.judged),
            "groups/no_signal_frac": Spread.of(self._groups_without_signal()),
        }

    def _groups_without_signal(self) -> list[bool]:
        """Of every prompt with several samples: whether all of them got the same reward."""
        size = self.batch.n_samples_per_prompt
        rewards = [j.result.reward for j in self.judged]
        groups = [rewards[i : i + size] for i in range(0, len(rewards), size)] if size > 1 else []
        return [min(group) == max(group) for group in groups]

    def evaluate(self, name: str) -> list[Outcome]:
        """Sample this worker's share of a held-out set, with the same noise every time."""
        assert self.awake, "rollout generates only while awake"
        judged = self._sample(self.eval_prompts[name], self.eval_samples, stream=EVAL_STREAM)
        self.evaluated = (name, judged)
        return [
            Outcome(
                prompt=j.group,
                reward=j.result.reward,
                parts=j.result.parts,
                response_len=len(j.generation.tokens),
                truncated=j.generation.finish_reason == "length",
            )
            for j in judged
        ]

    def dump_evaluation(self, step: int, append: bool) -> None:
        """Add this worker's samples of the set evaluated last to `evals/step_*.jsonl`; workers are called in turn."""
        name, judged = self.evaluated
        self.eval_writer.write(step, ({"set": name, **self._sample_record(j)} for j in judged), append=append)

    def dump(self, rollout_id: int, step_fields: Sequence[str]) -> None:
        """Add this worker's samples with per-token numbers to `rollouts/step_*.jsonl`; workers are called in turn."""
        rows = [j.row for j in self.judged]
        fields = self.queue.get(rollout_id, rows, list(step_fields)) if rows and step_fields else {}
        self.writer.write(rollout_id + 1, (self._record(i, fields) for i in range(len(rows))), append=self.rank > 0)

    def clear(self, rollout_id: int) -> None:
        """Drop the partition once the last reader is done."""
        self.queue.clear(rollout_id)

    def close(self) -> None:
        """End the engine's processes and the reward's."""
        try:
            if isinstance(self.engine, ServerEngine):
                self.engine.close()
        finally:
            self.judge.close()

    def _sample(self, prompts: Sequence[Prompt], samples_per_prompt: int, *, stream: int) -> list[Judged]:
        first, last = (len(prompts) * r // self.workers for r in (self.rank, self.rank + 1))
        jobs = [(p * samples_per_prompt + s, prompts[p]) for p in range(first, last) for s in range(samples_per_prompt)]
        tokens = [self._encode(prompt) for _, prompt in jobs]
        requests = [
            Request(tuple(ids), sample_seed(self.rollout.rollout_seed, stream, row), prompt.source)
            for (row, prompt), ids in zip(jobs, tokens, strict=True)
        ]
        generations = self.engine.generate(requests, self.sampling)
        return self.judge(
            [
                Sampled(row, row // samples_per_prompt, prompt, ids, generation)
                for (row, prompt), ids, generation in zip(jobs, tokens, generations, strict=True)
            ]
        )

    def _encode(self, prompt: Prompt) -> list[int]:
        ids = encode_prompt(self.tokenizer, prompt, apply_chat_template=self.data.apply_chat_template)
        limit = self.rollout.rollout_max_prompt_len
        if limit is not None and len(ids) > limit:
            raise ConfigError(prompt_too_long(prompt, len(ids), limit))
        return ids

    def _put(self, rollout_id: int) -> None:
        scalar = torch.tensor
        self.queue.put(
            rollout_id,
            [j.row for j in self.judged],
            {
                "tokens": [scalar([*j.prompt_tokens, *j.generation.tokens]) for j in self.judged],
                "prompt_lens": [scalar(len(j.prompt_tokens)) for j in self.judged],
                "response_lens": [scalar(len(j.generation.tokens)) for j in self.judged],
                "response_mask": [torch.ones(len(j.generation.tokens), dtype=torch.int64) for j in self.judged],
                "rollout_log_probs": [scalar(j.generation.log_probs, dtype=torch.float32) for j in self.judged],
                "rewards": [scalar(j.result.reward, dtype=torch.float32) for j in self.judged],
                "group_ids": [scalar(j.group) for j in self.judged],
                "truncated": [scalar(int(j.generation.finish_reason == "length")) for j in self.judged],
            },
        )

    def _prompt_text(self, judged: Judged) -> str:
        text: str = self.tokenizer.decode(judged.prompt_tokens, skip_special_tokens=True)
        return text

    def _record(self, index: int, fields: dict[str, list[Tensor]]) -> dict[str, Any]:
        judged = self.judged[index]
        return {
            **self._sample_record(judged),
            "prompt_token_ids": judged.prompt_tokens,
            "response_token_ids": judged.generation.tokens,
            "log_probs": judged.generation.log_probs,
            **{name: values[index].tolist() for name, values in fields.items()},
        }

    def _sample_record(self, judged: Judged) -> dict[str, Any]:
        return {
            "row": judged.row,
            "group": judged.group,
            "source": judged.prompt.source,
            "prompt": self._prompt_text(judged),
            "response": judged.response,
            "label": judged.prompt.label,
            "reward": judged.result.reward,
            "reward_parts": judged.result.parts,
            "finish_reason": judged.generation.finish_reason,
        }


def sample_seed(seed: int, stream: int, row: int) -> int:
    """Seed of one sample's noise: a function of the run's seed, the rollout and the row, of nothing else.

    So neither the number of workers nor a resume changes what is sampled.
    """
    return int(np.random.SeedSequence((seed, stream, row)).generate_state(1, np.uint64)[0] >> np.uint64(1))
