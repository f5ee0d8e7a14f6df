"""Rollout: generates responses with the engine, has them judged, and writes the samples to the queue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, partial

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from relax_cli.backends.rollout.protocol import (
    Generation,
    LoadingEngine,
    Request,
    RolloutEngine,
    SamplingParams,
    ServerEngine,
)
from relax_cli.backends.rollout.targets import WeightTarget
from relax_cli.config.held_out import section_of_set
from relax_cli.data.envs.load import EnvFactory
from relax_cli.data.order import PromptOrder
from relax_cli.data.prompts import Prompt, Prompts
from relax_cli.data.rewards.answers import comparable_answer
from relax_cli.data.rewards.checked import ChosenReward
from relax_cli.data.tokenise import encode_prompt, prompt_too_long
from relax_cli.errors import ConfigError, RunError
from relax_cli.plugin.graph import WEIGHT_VERSIONS
from relax_cli.roles.carried import BegunGroup
from relax_cli.roles.context import RoleContext
from relax_cli.roles.episodes import Episodes, Job
from relax_cli.roles.evaluation import Outcome
from relax_cli.roles.judging import (
    Judge,
    Judged,
    Sampled,
    for_training,
    queue_fields,
    reward_spreads,
    sample_record,
)
from relax_cli.roles.pool import POOL_STREAM, Drawn, DrawnGroup, Pool, Progress, Work, has_signal, renumbered
from relax_cli.roles.sample_files import SampleWriter
from relax_cli.roles.spread import Spread

EVAL_STREAM = 1 << 40
"""Stands for the rollout id in the seeds of held-out samples, so that every evaluation draws the same noise."""


class RolloutRole:
    """One generation worker; worker `rank` of `workers` takes its slice of every rollout's prompts."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        reward: ChosenReward | EnvFactory,
        prompts: dict[str, Sequence[Prompt]],
        samplings: dict[str, SamplingParams],
        context: RoleContext,
    ) -> None:
        """Prompts and samplings are those of each held-out set, and under "" those of the training."""
        config = context.config
        self.config, self.batch = config, config.batch
        self.engine = engine
        self.tokenizer = tokenizer
        chat = config.data.apply_chat_template
        self.judge: Judge | Episodes
        if isinstance(reward, EnvFactory):
            self.judge = Episodes(reward, config.episode, tokenizer, self._encode, apply_chat_template=chat)
        else:
            trace_file = context.run_dir / "logs" / f"reward-{context.rank}.txt"
            stop = samplings[""].stop
            self.judge = Judge(reward, tokenizer, stop, trace_file=trace_file)
        self.samplings = samplings
        self.prompt_sets, self.prompts = prompts, prompts[""]
        self.queue = context.queue
        self.rank = context.rank
        self.workers = context.ranks
        mixture = self.prompts.mixture if isinstance(self.prompts, Prompts) else ()
        self.order = PromptOrder(len(self.prompts), config.rollout.rollout_seed, config.data.shuffle, mixture)
        self.writer = SampleWriter(context.run_dir, part=context.rank)
        self.eval_writer = SampleWriter(context.run_dir, "evals", context.rank)
        self.awake = True
        self.has_weights = True
        self.judged: list[Judged] = []
        self.drawn = Drawn(self.batch.n_samples_per_prompt)
        self.pool = self._empty_pool()
        self.writes_versions = WEIGHT_VERSIONS in context.spec.writes
        self.evaluated: dict[str, list[Judged]] = {}
        self.written: tuple[int, dict[str, Spread]] | None = None

    def wake_for_weights(self) -> None:
        """Give the servers the memory of their weights back, but not yet that of their caches."""
        if not self.has_weights:
            self._servers.wake_for_weights()
            self.has_weights = True

    def wake(self) -> None:
        if not self.awake:
            self.engine.wake()
            self.awake = self.has_weights = True

    def sleep(self) -> None:
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

    def needs_weights(self) -> bool:
        """Whether weights have to be published before this worker generates."""
        return isinstance(self.engine, ServerEngine) and self.engine.needs_weights

    def weights_updated(self, version: int) -> None:
        self._servers.weights_updated(version)

    def load_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        assert isinstance(self.engine, LoadingEngine), "weights are sent to the engine's servers"
        self.engine.load_weights(named, version)

    @property
    def _servers(self) -> ServerEngine:
        assert isinstance(self.engine, ServerEngine), "the engine has no servers"
        return self.engine

    def generate(self, rollout_id: int) -> dict[str, Spread]:
        """Sample this worker's share of rollout `rollout_id` and write it to the queue, unless that was done before."""
        if self.written is None or self.written[0] != rollout_id:
            self.judged = self._sample_rows(self.order.rows(rollout_id, self.batch.rollout_batch_size), rollout_id)
            self._put(rollout_id)
            self.written = (rollout_id, self._spreads(self.judged))
        # Those of the step before were written meanwhile.
        self.writer.wait()
        return self.written[1]

    def mixture(self) -> list[tuple[int, float]]:
        return list(self.order.mixture) or [(len(self.prompts), 1.0)]

    def places(self, first: int, count: int) -> list[int]:
        return self.order.places(first, count)

    def draw(self, rollout_id: int, offset: int, rows: Sequence[int]) -> list[DrawnGroup]:
        """Sample this worker's share of rows of the data, of which the first is prompt `offset` of this rollout."""
        return self.drawn.groups(rollout_id, offset, lambda: self._sample_rows(rows, rollout_id, offset))

    def _empty_pool(self) -> Pool:
        def judge(samples: Sequence[Sampled]) -> list[Judged]:
            assert isinstance(self.judge, Judge), "episodes are not carried over"
            return [for_training(judged, self.config) for judged in self.judge(samples)]

        section = self.config.rollout
        work = Work(
            prompt=lru_cache(self.config.prompts_per_round)(
                lambda row: (self.prompts[row], self._encode(self.prompts[row]))
            ),
            seed=partial(sample_seed, section.rollout_seed, POOL_STREAM),
            generate=lambda requests: self.engine.generate(requests, self.samplings[""]),
            judge=judge,
        )
        return Pool(self.batch.n_samples_per_prompt, section, work, self.rank, self.workers)

    def advance(self, rollout_id: int, part: int, begun: Sequence[tuple[int, int]]) -> Progress:
        assert self.awake, "rollout generates only while awake"
        return self.pool.advance(rollout_id, part, begun)

    def carried(self) -> list[BegunGroup]:
        return self.pool.carried()

    def carry(self, groups: Sequence[BegunGroup]) -> None:
        """Take over what a run had in flight when it was saved."""
        self.pool.add(groups)

    def keep(self, rollout_id: int, chosen: Sequence[int], dropped: Sequence[int] = ()) -> dict[str, Spread]:
        """Write this worker's samples of the prompts at the `chosen` places of those drawn to the queue.

        The rewards returned are those of everything drawn: of chosen groups they would say little of the policy. With
        `advance` prompts at the `dropped` places leave as well; all others stay in flight.
        """
        if self.written is None or self.written[0] != rollout_id:
            drawn = self.pool.leave([*chosen, *dropped]) if self.writes_versions else self.drawn.leave()
            self.judged = renumbered(drawn, chosen, self.batch.n_samples_per_prompt)
            self._put(rollout_id)
            spreads = self._spreads(drawn)
            spreads["sampling/kept_reward"] = Spread.of(j.result.reward for j in self.judged)
            if self.writes_versions:
                # How many updates ago each token was sampled that trains.
                versions = (version for j in self.judged if j.trains for version in j.generation.weight_versions)
                spreads["partial/staleness"] = Spread.of(rollout_id - version for version in versions)
            self.written = (rollout_id, spreads)
        self.writer.wait()
        return self.written[1]

    def _spreads(self, drawn: Sequence[Judged]) -> dict[str, Spread]:
        """Rewards of everything drawn, the rest of what trains."""
        on_error = self.config.reward.reward_on_error
        masks = self.config.algorithm.mask_truncated or on_error == "drop"
        traces = [j.trace for j in self.judged if j.trace is not None]
        episodes = {
            "episode/turns": Spread.of(len(trace.turns) for trace in traces),
            "episode/observed_tokens": Spread.of(trace.mask.count(0) for trace in traces),
        }
        size = self.batch.n_samples_per_prompt
        groups = [self.judged[i : i + size] for i in range(0, len(self.judged), size)] if size > 1 else []
        return {
            **reward_spreads(drawn),
            **(episodes if traces else {}),
            **({"masked": Spread.of(not j.trains for j in self.judged)} if masks else {}),
            **({"failed": Spread.of(j.result.failed for j in drawn)} if on_error != "stop" else {}),
            "response_len": Spread.of(len(j.generation.tokens) for j in self.judged),
            "prompt_len": Spread.of(len(j.prompt_tokens) for j in self.judged),
            "truncated": Spread.of(j.generation.finish_reason == "length" for j in self.judged),
            "groups/no_signal_frac": Spread.of(not has_signal(group) for group in groups),
        }

    def evaluate(self, name: str) -> list[Outcome]:
        """Sample this worker's share of a held-out set, with the same noise every time."""
        samples = section_of_set(self.config.eval, name).n_samples_per_eval_prompt
        judged = self._sample(self.prompt_sets[name], samples, EVAL_STREAM, self.samplings[name])
        self.evaluated[name] = judged
        compared = self.config.reward.rm_type
        return [
            Outcome(
                prompt=j.group,
                reward=j.result.reward,
                parts=j.result.parts,
                response_len=len(j.generation.tokens),
                truncated=j.generation.finish_reason == "length",
                answer=comparable_answer(j.prompt.reward or compared, j.last_response, j.prompt.label, j.result),
            )
            for j in judged
        ]

    def dump_evaluation(self, step: int) -> None:
        """Write this worker's samples of all sets that were evaluated to `evals/step_*.zip`."""
        evaluated, self.evaluated = self.evaluated, {}
        samples = [
            {"set": name} | sample_record(j, self.tokenizer) for name, judged in evaluated.items() for j in judged
        ]
        self.eval_writer.write(step, samples)

    def dump(self, rollout_id: int, step_fields: Sequence[str]) -> None:
        """Begin to write this worker's part of the samples that `--dump-rollouts` chooses, with numbers per token."""
        section = self.config.run
        chosen = [judged for judged in self.judged if judged.row < section.most_dumped]
        if not chosen:
            return
        records = [sample_record(judged, self.tokenizer) for judged in chosen]
        if section.dump_token_numbers:
            names = list(step_fields)
            fields = self.queue.get(rollout_id, [judged.row for judged in chosen], names) if names else {}
            for i, (judged, record) in enumerate(zip(chosen, records, strict=True)):
                record["log_probs"] = np.array(judged.generation.log_probs, dtype=np.float32)
                for name, value in ((name, values[i]) for name, values in fields.items()):
                    kind = np.float32 if value.is_floating_point() else np.int32
                    record[name] = value.numpy().astype(kind) if value.dim() else float(value)
        self.writer.start(rollout_id + 1, records)

    def finish_dump(self) -> None:
        """Wait until what `dump` began is on the disk."""
        self.writer.wait()

    def clear(self, rollout_id: int) -> None:
        self.queue.clear(rollout_id)

    def close(self) -> None:
        try:
            if isinstance(self.engine, ServerEngine):
                self.engine.close()
        finally:
            self.judge.close()
            # A run that succeeded has called `finish_dump`; of one that failed, the first failure is the one to report.
            with suppress(RunError):
                self.writer.wait()

    def _sample(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        stream: int,
        sampling: SamplingParams,
        offset: int = 0,
    ) -> list[Judged]:
        """This worker's share of samples of the prompts, of which the first stands at place `offset`."""
        assert self.awake, "rollout generates only while awake"
        first, last = (len(prompts) * r // self.workers for r in (self.rank, self.rank + 1))
        jobs = [
            Job(row, offset + p, prompts[p], partial(sample_seed, self.config.rollout.rollout_seed, stream, row))
            for p in range(first, last)
            for row in range((offset + p) * samples_per_prompt, (offset + p + 1) * samples_per_prompt)
        ]
        if isinstance(self.judge, Episodes):
            return self.judge(self.engine, jobs, sampling)
        encoded = {place: self._encode(prompts[place]) for place in range(first, last)}
        tokens = [encoded[job.group - offset] for job in jobs]
        requests = [Request(tuple(ids), job.seed(), job.prompt.source) for job, ids in zip(jobs, tokens, strict=True)]

        def sampled(place: int, generation: Generation) -> Sampled:
            job = jobs[place]
            return Sampled(job.row, job.group, job.prompt, tokens[place], generation)

        ended = self.judge.listens(samples_per_prompt)
        generations = self.engine.generate(
            requests, sampling, lambda place, generation: ended(sampled(place, generation))
        )
        return self.judge([sampled(place, generation) for place, generation in enumerate(generations)])

    def _sample_rows(self, rows: Sequence[int], rollout_id: int, offset: int = 0) -> list[Judged]:
        """This worker's share of samples of some rows of the data, to train on."""
        prompts, size = [self.prompts[row] for row in rows], self.batch.n_samples_per_prompt
        sampled = self._sample(prompts, size, rollout_id, self.samplings[""], offset)
        return [for_training(judged, self.config) for judged in sampled]

    def _encode(self, prompt: Prompt) -> list[int]:
        ids = encode_prompt(self.tokenizer, prompt, apply_chat_template=self.config.data.apply_chat_template)
        limit = self.config.rollout.rollout_max_prompt_len
        if limit is not None and self.config.rollout.overlong_prompts == "truncate-left":
            return ids[-limit:]
        if limit is not None and len(ids) > limit:
            raise ConfigError(prompt_too_long(prompt, len(ids), limit))
        return ids

    def _put(self, rollout_id: int) -> None:
        if self.judged:
            fields = queue_fields(self.judged, versions=self.writes_versions, routes=self.samplings[""].routes)
            self.queue.put(rollout_id, [j.row for j in self.judged], fields)


def sample_seed(seed: int, stream: int, row: int, *turn: int) -> int:
    """Seed of one sample's noise: a function of the run's seed, the rollout, the row and the turn, of nothing else.

    So neither the number of workers nor a resume changes what is sampled.
    """
    sequence = np.random.SeedSequence((seed, stream, row), spawn_key=turn)
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))
