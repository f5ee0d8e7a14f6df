"""Rules of a configuration: a change that is refused, and the near miss that passes.

Changes are made to the configuration of `test_checks.make`, written `section__key`.
"""

from __future__ import annotations

from typing import Any

PPO_ROLES = {"actor": [1, 1], "critic": [1, 1], "rollout": [1, 1], "advantages": [1, 0]}

Change = dict[str, Any]


def roles(**changes: list[int] | None) -> dict[str, list[int]]:
    merged = {**PPO_ROLES, **changes}
    return {role: counts for role, counts in merged.items() if counts is not None}


URL = {"reward__rm_type": "remote", "reward__rm_url": "https://me:pass@[::1]:8000/judge?q=1"}

HELDOUT = {"eval__eval_interval": 1, "eval__eval_prompt_data": ["h=train.jsonl"]}
EPISODES = {"reward__rm_type": None, "episode__env": "mine", "episode__max_turns": 4}

CARRIES = {"rollout__partial_rollout": True, "batch__over_sampling_batch_size": 512}

PARTS_OF_SAMPLES = {
    "parallel__context_parallel_size": 2,
    "parallel__resource": roles(actor=[1, 2], critic=[1, 2]),
    "batch__use_dynamic_batch_size": True,
    "rollout__rollout_max_prompt_len": 8,
}

LINEAR = {"optimizer__lr": 1e-3, "optimizer__lr_decay_style": "linear"}

REFUSED_AND_NEAR_MISS: list[tuple[str, Change, Change]] = [
    (
        "recompute-incomplete",
        {"parallel__recompute_granularity": "full", "parallel__recompute_method": "uniform"},
        {
            "parallel__recompute_granularity": "full",
            "parallel__recompute_method": "uniform",
            "parallel__recompute_num_layers": 1,
        },
    ),
    (
        "recompute-incomplete",
        {"parallel__recompute_granularity": "full", "parallel__recompute_num_layers": 1},
        {"parallel__recompute_granularity": "selective"},
    ),
    (
        "recompute-module-unknown",
        {"parallel__recompute_granularity": "selective", "parallel__recompute_modules": ["core_attn", "moe"]},
        {"parallel__recompute_granularity": "selective", "parallel__recompute_modules": ["core_attn", "mlp"]},
    ),
    (
        "chat-template-kwargs-reserved",
        {"data__chat_template_kwargs": {"tools": [], "x": 1}, "data__apply_chat_template": True},
        {"data__chat_template_kwargs": {"enable_thinking": False}, "data__apply_chat_template": True},
    ),
    (
        "lora-transformer-engine",
        {"model__lora_rank": 4, "parallel__device": "cuda", "parallel__transformer_impl": "transformer_engine"},
        {"model__lora_rank": 4, "parallel__device": "cuda", "parallel__transformer_impl": "auto"},
    ),
    (
        "lora-transformer-engine",
        {"critic__critic_lora_rank": 4, "parallel__transformer_impl": "transformer_engine"},
        {"parallel__transformer_impl": "transformer_engine", "parallel__device": "cuda"},
    ),
    ("reward-weights", {"reward__rm_type": "exact=1,format=0"}, {"reward__rm_type": "exact=1,format=0.1"}),
    ("reward-weights", {"reward__rm_type": "exact,exact"}, {"reward__rm_type": "exact,format"}),
    ("reward-unknown", {"reward__rm_type": "exact=1,formt=2"}, {"reward__rm_type": "exact=1,format=2"}),
    (
        "reward-key-unknown",
        {"reward__rm_type": "math,exact", "reward__reward_key": "correct"},
        {"reward__rm_type": "math", "reward__reward_key": "correct"},
    ),
    (
        "overlong-penalty-buffer",
        {"reward__overlong_penalty": 1.0},
        {"reward__overlong_penalty": 1.0, "reward__overlong_buffer_len": 1},
    ),
    (
        "overlong-penalty-buffer",
        {"reward__overlong_penalty": 1.0, "reward__overlong_buffer_len": 5, "rollout__rollout_max_response_len": 4},
        {"reward__overlong_penalty": 1.0, "reward__overlong_buffer_len": 4, "rollout__rollout_max_response_len": 4},
    ),
    (
        "mask-truncated-bootstrap",
        {"algorithm__mask_truncated": True, "algorithm__bootstrap_truncated": True},
        {"algorithm__mask_truncated": True},
    ),
    ("reward-missing", {"reward__rm_type": None}, {}),
    ("partial-rollout-env", {**EPISODES, **CARRIES}, {**EPISODES, "rollout__partial_rollout": True}),
    ("partial-rollout-uncorrected", CARRIES, {**CARRIES, "algorithm__use_rollout_logprobs": True}),
    ("partial-rollout-uncorrected", CARRIES, {**CARRIES, "algorithm__use_tis": True}),
    (
        "partial-rollout-stop-strings",
        {**CARRIES, "rollout__rollout_stop": ["x"], "rollout__rollout_engine": "sglang"},
        {**CARRIES, "rollout__rollout_stop": ["x"]},
    ),
    ("curriculum-unknown", {"data__curriculum": "lernability"}, {"data__curriculum": "learnability"}),
    ("env-unknown", {**EPISODES, "episode__env": "calk"}, {**EPISODES}),
    ("env-and-reward", {**EPISODES, "reward__rm_type": "exact"}, {**EPISODES}),
    ("env-turns", {**EPISODES, "episode__max_turns": 5}, {**EPISODES}),
    ("reward-unknown", {"reward__rm_type": "exakt"}, {"reward__rm_type": "math"}),
    (
        "resource-unknown-role",
        {"parallel__resource": roles(critics=[1, 1])},
        {"parallel__resource": roles(reference=[1, 1])},
    ),
    (
        "resource-missing-role",
        {"parallel__resource": roles(rollout=None)},
        {"parallel__resource": roles(critic=None)},
    ),
    ("resource-one-service", {"parallel__resource": roles(actor=[2, 1])}, {}),
    ("resource-negative", {"parallel__resource": roles(advantages=[1, -1])}, {}),
    (
        "resource-no-device",
        {"parallel__resource": roles(critic=[1, 0])},
        {"parallel__resource": roles(critic=[1, 1])},
    ),
    (
        "local-launcher-one-process",
        {"parallel__launcher": "local", "parallel__resource": roles(actor=[1, 2])},
        {"parallel__launcher": "local"},
    ),
    (
        "ranks-not-divisible",
        {"parallel__context_parallel_size": 2, "parallel__resource": roles(actor=[1, 3], critic=[1, 2])},
        {"parallel__context_parallel_size": 2, "parallel__resource": roles(actor=[1, 2], critic=[1, 2])},
    ),
    ("fully-async-not-supported", {"parallel__fully_async": True}, {"parallel__fully_async": False}),
    (
        "ranks-not-divisible",
        {"parallel__tensor_model_parallel_size": 2, "parallel__resource": roles(actor=[1, 2], critic=[1, 3])},
        {"parallel__tensor_model_parallel_size": 2, "parallel__resource": roles(actor=[1, 2], critic=[1, 4])},
    ),
    (
        "batch-arithmetic",
        {"batch__rollout_batch_size": 16, "batch__global_batch_size": 8, "batch__num_steps_per_rollout": 3},
        {"batch__rollout_batch_size": 16, "batch__global_batch_size": 8, "batch__num_steps_per_rollout": 2},
    ),
    (
        "batch-arithmetic",
        {"batch__rollout_batch_size": 16, "batch__num_steps_per_rollout": 3},
        {"batch__rollout_batch_size": 18, "batch__num_steps_per_rollout": 3},
    ),
    (
        "batch-arithmetic",
        {"batch__rollout_batch_size": 5, "batch__n_samples_per_prompt": 3, "batch__global_batch_size": 6},
        {"batch__rollout_batch_size": 4, "batch__n_samples_per_prompt": 3, "batch__global_batch_size": 6},
    ),
    (
        "dynamic-sampling-groups",
        {"batch__dynamic_sampling": True, "batch__n_samples_per_prompt": 1},
        {"batch__dynamic_sampling": True, "batch__n_samples_per_prompt": 2},
    ),
    (
        "over-sampling-too-small",
        {"batch__rollout_batch_size": 8, "batch__dynamic_sampling": True, "batch__over_sampling_batch_size": 7},
        {"batch__rollout_batch_size": 8, "batch__dynamic_sampling": True, "batch__over_sampling_batch_size": 8},
    ),
    (
        "batch-smaller-than-ranks",
        {"batch__rollout_batch_size": 1, "parallel__resource": roles(actor=[1, 2])},
        {"batch__rollout_batch_size": 2, "parallel__resource": roles(actor=[1, 2])},
    ),
    (
        "reward-key-unknown",
        {"reward__reward_key": "score"},
        {"reward__rm_type": "reasoning_gym", "reward__reward_key": "score"},
    ),
    (
        "reward-key-unknown",
        {"reward__rm_type": "math", "reward__reward_key": "corect"},
        {"reward__rm_type": "math", "reward__reward_key": "correct"},
    ),
    ("reward-key-unknown", {"reward__rm_type": "math", "reward__reward_key": ""}, {**URL, "reward__reward_key": "any"}),
    ("reward-url-missing", {"reward__rm_type": "remote"}, URL),
    ("reward-url-unused", {"reward__rm_url": "http://host/judge"}, URL),
    *[
        ("reward-url-invalid", {"reward__rm_type": "remote", "reward__rm_url": url}, URL)
        for url in ("host:8000/judge", "judge", "ftp://host/judge", "http:///judge", "http://host:99999", "http://a b/")
    ],
    (
        "token-budget-missing",
        {"batch__use_dynamic_batch_size": True},
        {"batch__use_dynamic_batch_size": True, "batch__max_tokens_per_gpu": 99},
    ),
    (
        "token-budget-too-small",
        {"batch__use_dynamic_batch_size": True, "batch__max_tokens_per_gpu": 11, "rollout__rollout_max_prompt_len": 8},
        {"batch__use_dynamic_batch_size": True, "batch__max_tokens_per_gpu": 12, "rollout__rollout_max_prompt_len": 8},
    ),
    (
        "token-budget-too-small",
        PARTS_OF_SAMPLES | {"batch__max_tokens_per_gpu": 5},
        PARTS_OF_SAMPLES | {"batch__max_tokens_per_gpu": 6},
    ),
    (
        "token-budget-too-small",
        {
            "batch__use_dynamic_batch_size": True,
            "batch__max_tokens_per_gpu": 4,
            "algorithm__bootstrap_truncated": True,
        },
        {"batch__use_dynamic_batch_size": True, "batch__max_tokens_per_gpu": 4},
    ),
    ("run-length-missing", {"batch__num_rollout": None, "batch__num_epoch": None}, {"batch__num_rollout": None}),
    (
        "save-interval-without-save",
        {"checkpoint__save_interval": 2},
        {"checkpoint__save_interval": 2, "checkpoint__save": "a", "critic__critic_save": "c"},
    ),
    (
        "critic-save-without-save",
        {"critic__critic_save": "c"},
        {"critic__critic_save": "c", "checkpoint__save": "a"},
    ),
    (
        "eval-interval-without-data",
        {"eval__eval_interval": 1},
        {"eval__eval_interval": 1, "eval__eval_prompt_data": ["h=train.jsonl"]},
    ),
    (
        "eval-data-unused",
        {"eval__eval_prompt_data": ["h=train.jsonl"]},
        {"eval__eval_interval": 1, "eval__eval_prompt_data": ["h=train.jsonl"]},
    ),
    *(
        (
            "eval-sampling",
            {**HELDOUT, "eval__eval_sampling": [item]},
            {**HELDOUT, "eval__eval_sampling": ["h:temperature=0, n=8", "h:top_p=0.5,max_response_len=4"]},
        )
        for item in ("n=8", "other:n=8", "h:", "h:m=8", "h:n", "h:n=0", "h:n=1,n=2", "h:temperature=-1", "h:top_p=x")
    ),
    *(
        (
            "keep-best-metric",
            {**HELDOUT, "checkpoint__keep_best": metric},
            {**HELDOUT, "eval__eval_sampling": ["h:n=2"], "checkpoint__keep_best": good},
        )
        for metric, good in (
            ("reward/mean", "eval/h/reward/mean"),
            ("eval/other/reward/mean", "eval/h/reward/part/correct"),
            ("eval/h/pass@2", "eval/h/pass@2"),
            ("eval/h/majority@2", "eval/h/majority@2"),
            ("eval/h/response_len/mean", "eval/h/reward/min"),
        )
    ),
    (
        "min-lr-above-lr",
        {"optimizer__lr": 1.0, "optimizer__min_lr": 2.0, "optimizer__lr_decay_style": "linear"},
        {"optimizer__lr": 1.0, "optimizer__min_lr": 1.0, "optimizer__lr_decay_style": "linear"},
    ),
    (
        "min-lr-above-lr",
        {**LINEAR, "optimizer__min_lr": 2e-4, "critic__critic_lr": 1e-4},
        {**LINEAR, "optimizer__min_lr": 1e-4, "critic__critic_lr": 1e-4},
    ),
    (
        "min-lr-above-lr",
        {**LINEAR, "optimizer__min_lr": 2e-4, "critic__critic_lr": 1e-4},
        {**LINEAR, "optimizer__min_lr": 2e-4, "critic__critic_lr": 1e-4, "parallel__resource": roles(critic=None)},
    ),
    (
        "min-lr-above-lr",
        {**LINEAR, "optimizer__lr_decay_style": "cosine", "optimizer__min_lr": 2.0},
        {**LINEAR, "optimizer__lr_decay_style": "constant", "optimizer__min_lr": 2.0},
    ),
    ("warmup-too-long", {"optimizer__lr_warmup_iters": 2}, {"optimizer__lr_warmup_iters": 1}),
    ("warmup-too-long", {"critic__critic_lr_warmup_iters": 100}, {"critic__critic_lr_warmup_iters": 1}),
    (
        "warmup-too-long",
        {"optimizer__lr_warmup_iters": 7, "batch__num_rollout": None, "batch__num_epoch": 64},
        {"optimizer__lr_warmup_iters": 5, "batch__num_rollout": None, "batch__num_epoch": 64},
    ),
    (
        # One rollout in two trains the actor: two steps.
        "warmup-too-long",
        {"optimizer__lr_warmup_iters": 2, "critic__num_critic_only_steps": 1, "batch__num_steps_per_rollout": 2},
        {"optimizer__lr_warmup_iters": 1, "critic__num_critic_only_steps": 1, "batch__num_steps_per_rollout": 2},
    ),
    (
        "warmup-too-long",
        {"critic__critic_lr_warmup_iters": 3, "critic__critic_updates_per_step": 1},
        {"critic__critic_lr_warmup_iters": 3, "critic__critic_updates_per_step": 2},
    ),
    ("actor-never-trained", {"critic__num_critic_only_steps": 2}, {"critic__num_critic_only_steps": 1}),
    ("actor-never-trained", {"critic__num_critic_only_steps": 9}, {"critic__num_critic_only_steps": 0}),
    (
        "actor-never-trained",
        {"critic__num_critic_only_steps": 3},
        {"critic__num_critic_only_steps": 3, "parallel__resource": roles(critic=None)},
    ),
    (
        "kl-twice",
        {"algorithm__kl_coef": 0.1, "algorithm__use_kl_loss": True, "algorithm__kl_loss_coef": 0.1},
        {"algorithm__use_kl_loss": True, "algorithm__kl_loss_coef": 0.1},
    ),
    (
        "kl-twice",
        {"algorithm__kl_coef": 0.1, "algorithm__use_kl_loss": True, "algorithm__kl_loss_coef": 1e-3},
        {"algorithm__kl_coef": 0.1, "algorithm__kl_loss_coef": 0.1},
    ),
    ("filtered-sampling", {"rollout__rollout_top_p": 0.9}, {"rollout__rollout_top_p": 1.0}),
    ("filtered-sampling", {"rollout__rollout_top_k": 5}, {"rollout__rollout_top_k": -1}),
    ("filtered-sampling", {"rollout__rollout_top_k": 1}, {"rollout__rollout_top_k": 0}),
    (
        "tis-bounds",
        {"algorithm__use_tis": True, "algorithm__tis_clip_low": 3.0},
        {"algorithm__use_tis": True, "algorithm__tis_clip_low": 2.0},
    ),
    (
        "tis-no-effect",
        {"algorithm__use_tis": True, "algorithm__use_rollout_logprobs": True},
        {"algorithm__use_tis": True},
    ),
    (
        "kl-loss-without-coef",
        {"algorithm__use_kl_loss": True},
        {"algorithm__use_kl_loss": True, "algorithm__kl_loss_coef": 0.1},
    ),
    (
        "kl-loss-k1",
        {"algorithm__use_kl_loss": True, "algorithm__kl_loss_coef": 0.1},
        {"algorithm__use_kl_loss": True, "algorithm__kl_loss_coef": 0.1, "algorithm__kl_loss_type": "k2"},
    ),
    ("model-missing", {"model__hf_checkpoint": ""}, {}),
    ("model-folder-missing", {"model__hf_checkpoint": "Qwen/Qwen3-0.6B"}, {}),
    ("model-package-unknown", {"model__hf_checkpoint": "package:llm-smollm3"}, {}),
    (
        "heads-not-divisible",
        {"parallel__tensor_model_parallel_size": 4, "parallel__resource": roles(actor=[1, 4], critic=[1, 4])},
        {"parallel__tensor_model_parallel_size": 2, "parallel__resource": roles(actor=[1, 4], critic=[1, 4])},
    ),
    (
        "moe-balance-split",
        {"parallel__moe_aux_loss_coeff": 0.1, "parallel__pipeline_model_parallel_size": 2}
        | {"parallel__resource": roles(actor=[1, 2], critic=[1, 2])},
        {"parallel__pipeline_model_parallel_size": 2, "parallel__resource": roles(actor=[1, 2], critic=[1, 2])},
    ),
    (
        "moe-balance-split",
        {"parallel__moe_aux_loss_coeff": 0.1, "parallel__context_parallel_size": 2}
        | {"parallel__resource": roles(actor=[1, 2], critic=[1, 2])},
        {"parallel__moe_aux_loss_coeff": 0.1},
    ),
    (
        "pipeline-layers",
        {
            "parallel__pipeline_model_parallel_size": 2,
            "parallel__decoder_last_pipeline_num_layers": 9,
            "parallel__resource": roles(actor=[1, 2], critic=[1, 2]),
        },
        {"parallel__resource": roles(actor=[1, 2], critic=[1, 2])},
    ),
    (
        "longer-than-positions",
        {"rollout__rollout_max_prompt_len": 29},
        {"rollout__rollout_max_prompt_len": 28},
    ),
    (
        "longer-than-positions",
        {"rollout__rollout_max_response_len": 33},
        {"rollout__rollout_max_response_len": 32},
    ),
    ("prompt-data-missing", {"data__prompt_data": ""}, {}),
    ("reasoning-gym-task", {"data__prompt_data": "reasoning-gym:chain_some"}, {}),
    (
        "eval-data-name",
        {"eval__eval_interval": 1, "eval__eval_prompt_data": ["train.jsonl"]},
        {"eval__eval_interval": 1, "eval__eval_prompt_data": ["a=train.jsonl", "b=train.jsonl"]},
    ),
    (
        "eval-data-name",
        {"eval__eval_interval": 1, "eval__eval_prompt_data": ["a=train.jsonl", "a=train.jsonl"]},
        {"eval__eval_interval": 1, "eval__eval_prompt_data": ["a=train.jsonl"]},
    ),
    (
        "reward-needs-label",
        {"data__label_key": None},
        {"data__label_key": None, "reward__rm_type": "reasoning_gym"},
    ),
    (
        "ranks-vs-cores",
        {"parallel__resource": roles(rollout=[1, 9])},
        {"parallel__resource": roles(rollout=[1, 8])},
    ),
    (
        "overlap-needs-cpu",
        {"parallel__overlap_updates": True, "parallel__device": "cuda"},
        {"parallel__overlap_updates": True},
    ),
    ("ray-cpus", {"parallel__ray_num_cpus": 3}, {"parallel__ray_num_cpus": 4}),
    (
        "one-folder-for-two",
        {"checkpoint__save": "a", "critic__critic_save": "./a/"},
        {"checkpoint__save": "a", "critic__critic_save": "a/critic"},
    ),
]
