"""Options without effect: the rule that warns, the options that are set, and what makes them count."""

from __future__ import annotations

from typing import Any

ON = True
UNUSED_OPTION_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("critic-option-unused", {"critic_lr": "1e-5"}, {"advantage_estimator": "ppo"}),
    ("critic-option-unused", {"num_critic_only_steps": "3"}, {"num_critic_only_steps": "0"}),
    ("critic-option-unused", {"critic_init_from_actor": ON}, {"advantage_estimator": "ppo"}),
    ("episode-option-unused", {"max_turns": "3"}, {"env": "mine"}),
    ("reward-option-unused", {"rm_timeout": "3", "env": "mine"}, {"env": None}),
    ("kl-option-unused", {"kl_loss_coef": "0.1"}, {"use_kl_loss": ON}),
    ("kl-option-unused", {"kl_loss_type": "k3", "kl_coef": "0.1"}, {"use_kl_loss": ON}),
    ("ref-load-unused", {"ref_load": "model"}, {"use_kl_loss": ON}),
    ("ref-load-unused", {"ref_load": "model"}, {"kl_coef": "0.1"}),
    ("tis-option-unused", {"tis_clip": "3"}, {"use_tis": ON}),
    ("tis-option-unused", {"tis_clip_low": "0.5"}, {"tis_clip_low": "0"}),
    ("chat-option-unused", {"system_prompt": "be brief"}, {"apply_chat_template": True}),
    ("overlong-prompts-unused", {"overlong_prompts": "drop"}, {"rollout_max_prompt_len": "64"}),
    ("min-lr-unused", {"min_lr": "1e-7"}, {"lr_decay_style": "linear"}),
    ("token-budget-unused", {"max_tokens_per_gpu": "512"}, {"use_dynamic_batch_size": ON}),
    (
        "micro-batch-size-unused",
        {"micro_batch_size": "4", "use_dynamic_batch_size": ON},
        {"use_dynamic_batch_size": False},
    ),
    ("sglang-option-unused", {"sglang_mem_fraction_static": "0.5"}, {"device": "cuda"}),
    ("sglang-option-unused", {"sglang_options": '{"log_level": "debug"}'}, {"rollout_engine": "sglang"}),
    ("sglang-option-unused", {"partial_rollout": ON, "rollout_engine": "embedded"}, {"rollout_engine": "sglang"}),
    ("sglang-option-unused", {"rollout_request_timeout": "60"}, {"rollout_external": ON}),
    ("recompute-option-unused", {"recompute_method": "uniform"}, {"recompute_granularity": "full"}),
    (
        "recompute-option-unused",
        {"recompute_num_layers": "2", "recompute_granularity": "selective"},
        {"recompute_granularity": "full"},
    ),
    ("recompute-option-unused", {"recompute_modules": ["mlp"]}, {"recompute_granularity": "selective"}),
    ("sequence-parallel-unused", {"sequence_parallel": ON}, {"tensor_model_parallel_size": "2"}),
    ("cpu-offload-unused", {"optimizer_cpu_offload": ON, "device": "cpu"}, {"device": "cuda"}),
    ("num-epoch-unused", {"num_epoch": "2", "num_rollout": "9"}, {"num_rollout": None}),
    ("save-option-unused", {"keep_checkpoints": "2"}, {"save": "actor"}),
    ("save-option-unused", {"on_save_error": "continue"}, {"save": "actor"}),
    ("eval-option-unused", {"n_samples_per_eval_prompt": "4"}, {"eval_prompt_data": ["h=x.jsonl"]}),
    ("eval-option-unused", {"eval_temperature": "0.5"}, {"eval_prompt_data": ["h=x.jsonl"]}),
    ("eval-option-unused", {"eval_pass_reward": "0.5"}, {"eval_prompt_data": ["h=x.jsonl"]}),
    ("sglang-option-unused", {"sglang_server_concurrency": "8"}, {"device": "cuda"}),
    ("sglang-option-unused", {"partial_rollout": ON}, {"rollout_engine": "sglang"}),
    ("ray-option-unused", {"ray_num_cpus": "8", "launcher": "local"}, {"launcher": "ray"}),
    ("ray-option-unused", {"queue_timeout": "8", "launcher": "local"}, {"launcher": "ray"}),
    ("estimator-option-unused", {"eps_clip_c": "3", "advantage_estimator": "sapo"}, {"advantage_estimator": "grpo"}),
    ("estimator-option-unused", {"eps_clip": "0.1", "advantage_estimator": "sapo"}, {"advantage_estimator": "gspo"}),
    (
        "per-token-loss-unused",
        {"calculate_per_token_loss": ON, "loss_aggregation": "constant"},
        {"loss_aggregation": "token-mean"},
    ),
    ("estimator-option-unused", {"eps_clip_c": "3", "advantage_estimator": "cispo"}, {"advantage_estimator": "ppo"}),
    ("estimator-option-unused", {"lambd": "0.95"}, {"advantage_estimator": "ppo"}),
    ("estimator-option-unused", {"sapo_tau_neg": "2"}, {"advantage_estimator": "sapo"}),
    ("estimator-option-unused", {"cispo_by_sign": ON}, {"cispo_by_sign": False}),
    (
        "estimator-option-unused",
        {"disable_grpo_std_normalization": ON, "advantage_estimator": "ppo"},
        {"advantage_estimator": "cispo"},
    ),
]
