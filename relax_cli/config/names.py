"""Which option is meant by a name that is not one: misspelt, or that of another trainer."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

OTHER_TRAINERS = {
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_eps": "adam_epsilon optimizer_eps",
    "advantage_estimator": "adv_estimator algo algorithm_name estimator rl_algorithm",
    "apply_chat_template": "chat_template use_chat_template",
    "calculate_per_token_loss": "token_level_loss",
    "clip_grad": "grad_clip gradient_clipping max_grad_norm max_norm",
    "critic_lr": "critic_learning_rate value_learning_rate vf_lr",
    "custom_rm_path": "custom_reward custom_reward_function remote_rm reward_fn reward_func reward_funcs "
    "reward_function reward_module",
    "device": "accelerator",
    "entropy_coef": "ent_coef entropy_bonus entropy_coeff entropy_coefficient entropy_loss_coef",
    "eps_clip": "clip_eps clip_range clip_ratio cliprange epsilon policy_clip ppo_clip",
    "eps_clip_c": "clip_ratio_c dual_clip",
    "eps_clip_high": "clip_higher clip_ratio_high eps_high epsilon_high",
    "eval_interval": "eval_every eval_freq eval_steps test_freq val_check_interval validation_interval",
    "eval_prompt_data": "eval_data eval_dataset eval_file eval_files test_data val_data val_dataset val_file "
    "val_files validation_data",
    "gamma": "discount discount_factor",
    "global_batch_size": "mini_batch_size minibatch_size",
    "hf_checkpoint": "actor_model_name_or_path base_model hf_model model model_id model_name model_name_or_path "
    "model_path pretrain pretrained pretrained_model_name_or_path",
    "input_key": "input_column prompt_column prompt_field prompt_key question_key",
    "keep_checkpoints": "keep_last max_ckpt_num max_checkpoints save_total_limit",
    "kl_coef": "init_kl_coef kl_ctrl kl_penalty_coef",
    "kl_loss_coef": "beta kl_beta kl_loss_weight kl_weight",
    "kl_loss_type": "kl_estimator kl_type",
    "label_key": "answer_column answer_key ground_truth_key label_column response_key solution_key target_key",
    "loss_aggregation": "loss_agg_mode",
    "lambd": "gae_lambda lam lambda lambda_",
    "lora_rank": "lora_r",
    "lora_targets": "lora_target_modules target_modules",
    "load": "ckpt_path load_checkpoint restore resume resume_from resume_from_checkpoint resume_from_path",
    "lr": "actor_learning_rate actor_lr learning_rate optimizer_lr step_size",
    "lr_decay_style": "lr_schedule lr_scheduler lr_scheduler_type scheduler scheduler_type",
    "lr_warmup_iters": "lr_warmup_steps num_warmup_steps warmup warmup_iters warmup_steps",
    "max_tokens_per_gpu": "max_num_tokens max_token_len_per_gpu ppo_max_token_len_per_gpu",
    "micro_batch_size": "device_batch_size micro_train_batch_size per_device_batch_size per_device_train_batch_size "
    "ppo_micro_batch_size ppo_micro_batch_size_per_gpu train_micro_batch_size",
    "expert_model_parallel_size": "ep ep_size expert_parallel expert_parallel_size moe_ep_size",
    "n_samples_per_eval_prompt": "eval_n eval_num_samples num_eval_samples",
    "n_samples_per_prompt": "group_size k n n_rollouts n_samples num_generations num_return_sequences "
    "num_rollouts_per_prompt num_samples rollout_n samples_per_prompt",
    "normalize_advantages": "adv_norm norm_adv normalize_advantage whiten_advantages",
    "num_critic_only_steps": "critic_warmup critic_warmup_steps freeze_actor_steps value_pretrain_steps",
    "num_epoch": "epoch epochs num_epochs num_train_epochs n_epochs total_epochs",
    "num_rollout": "iterations max_iterations max_steps num_steps num_train_steps num_updates steps total_steps "
    "total_training_steps train_steps",
    "num_steps_per_rollout": "num_minibatches num_mini_batches updates_per_rollout",
    "context_parallel_size": "context_parallel cp cp_size",
    "pipeline_model_parallel_size": "pipeline_parallel_size pp pp_size",
    "prompt_data": "data data_path dataset dataset_name dataset_path prompt_dataset train_data train_dataset "
    "train_file train_files training_data",
    "ref_load": "ref_model ref_model_path ref_path ref_pretrain reference_model",
    "resource": "actor_num_gpus_per_node gpus n_gpus n_gpus_per_node ngpus nnodes num_gpus num_processes world_size",
    "reward_key": "reward_name",
    "rm_type": "reward reward_type rm rm_name",
    "rm_url": "remote_rm_url reward_server reward_url",
    "rollout_batch_size": "batch_size gen_batch_size num_prompts_per_step prompt_batch_size train_batch_size "
    "train_prompt_bsz",
    "rollout_engine": "inference_backend inference_engine use_vllm vllm",
    "rollout_max_prompt_len": "max_prompt_len max_prompt_length max_prompt_tokens prompt_max_len",
    "rollout_max_response_len": "generate_max_len max_completion_length max_gen_len max_generation_length "
    "max_new_tokens max_response_len max_tokens max_response_length response_length",
    "rollout_stop": "stop stop_sequences stop_strings stop_words",
    "rollout_temperature": "sampling_temperature temp temperature",
    "rollout_top_k": "top_k",
    "rollout_top_p": "top_p",
    "router_replay": "routing_replay use_rollout_routing_replay use_routing_replay enable_rollout_routing_replay",
    "run_dir": "exp_dir experiment_dir log_dir logdir logging_dir run_name tensorboard_dir",
    "save": "checkpoint_dir ckpt_dir default_local_dir out_dir output output_dir save_dir save_path",
    "save_interval": "ckpt_freq save_every save_freq save_steps",
    "seed": "random_seed",
    "sglang_mem_fraction_static": "gpu_memory_utilization mem_fraction_static vllm_gpu_memory_utilization",
    "tensor_model_parallel_size": "tensor_parallel tensor_parallel_size tp tp_size",
    "tis_clip": "tis_imp_ratio_cap",
    "use_dynamic_batch_size": "use_dynamic_bsz",
    "use_kl_loss": "kl_loss",
    "use_tis": "importance_sampling_correction",
    "value_clip": "cliprange_value clip_range_vf value_clip_range vf_clip vf_clip_param",
    "weight_decay": "l2 wd",
}
"""Option to names that other trainers have for it."""
DONE_OTHERWISE = {
    "activation_checkpointing enable_gradient_checkpointing gradient_checkpointing": "--recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1",
    "checkpoint": "checkpoints are written to --save and resumed from with --load; --hf-checkpoint is the model",
    "config config_file": "recipes are given as --recipe NAME|FILE",
    "critic_model critic_model_path critic_path critic_pretrain value_model": "a new critic is the model of "
    "--hf-checkpoint with a value head; --critic-load resumes a critic that a run saved",
    "gradient_accumulation_steps": "micro-batches add up by themselves: set --micro-batch-size and --global-batch-size",
    "kl_penalty": "the KL term of the reward (--kl-coef) is k1; --kl-loss-type is for --use-kl-loss",
    "local_rank node_rank": "a run starts its own processes, so it needs no torchrun: --resource says how many",
    "loss_type": "--advantage-estimator names the objective, --loss-aggregation what it is averaged over",
    "max_epochs num_iterations num_ppo_epochs ppo_epochs": "the actor uses every rollout once, in "
    "--num-steps-per-rollout steps; --critic-updates-per-step is for the critic",
    "optimizer": "the optimizer is AdamW: set --lr, --adam-beta1, --adam-beta2 and --weight-decay",
    "ppo_mini_batch_size": "verl counts prompts, --global-batch-size samples: prompts × --n-samples-per-prompt",
    "report_to": "metrics are in metrics.jsonl of the run folder; --track NAME also sends them to a tracker",
    "reward_model reward_pretrain": "a reward model answers on a server of its own: --rm-type remote --rm-url URL",
    "rollout_stop_token_ids stop_token_ids": "a response ends at the eos_token_id of generation_config.json, and at "
    "the texts of --rollout-stop",
    "value_loss_coef vf_coef": "the critic has an optimizer of its own: set --critic-lr",
    "whiten_rewards": "rewards are not whitened; --normalize-advantages whitens advantages",
}
"""Names that other trainers have for what relax does otherwise, and how."""
NOT_HERE = {name: text for names, text in DONE_OTHERWISE.items() for name in names.split()}
SHORTEST = 5
"""Letters of a name of another trainer that a typing error can be told from."""
_MEANT = {other: option for option, others in OTHER_TRAINERS.items() for other in others.split()}


def nearest(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The candidate spelt most like `name`, or an empty string."""
    return next(iter(difflib.get_close_matches(name, sorted(candidates), n=1, cutoff=cutoff)), "")


def same_option(name: str, options: Collection[str]) -> str:
    """The option (by field name) that is called `name`, as a flag or a key, here or in another trainer."""
    plain = _plain(name)
    option = plain if plain in options else _MEANT.get(plain, "")
    return option if option in options else ""


def meant_option(name: str, options: Collection[str]) -> str:
    """`same_option`, or else the option whose name, here or in another trainer, is spelt most like it, or empty."""
    if option := same_option(name, options):
        return option
    others = (other for other in (*_MEANT, *NOT_HERE) if len(other) >= SHORTEST)
    near = nearest(_plain(name), {*options, *others}, cutoff=0.8) or nearest(_plain(name), options, cutoff=0.7)
    return same_option(near, options) if _is_misspelt(_plain(name), near) else ""


def done_otherwise(name: str) -> str:
    """How relax does what other trainers call `name`, or nearly so; empty where there is nothing to say."""
    return NOT_HERE.get(nearest(_plain(name), NOT_HERE, cutoff=0.9), "")


def _is_misspelt(name: str, option: str) -> bool:
    """Whether two names differ in letters only: `target_kl` has another word than `label_key`, and another meaning."""
    joined = difflib.SequenceMatcher(None, name.replace("_", ""), option.replace("_", "")).ratio()
    words, others = name.split("_"), option.split("_")
    return joined > 0.9 or (
        len(words) == len(others)
        and all(nearest(word, [other], cutoff=0.65) for word, other in zip(words, others, strict=True))
    )


def _plain(name: str) -> str:
    return name.strip().lstrip("-–—").lower().replace("-", "_").rpartition(".")[2]
