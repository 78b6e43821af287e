"""Messages for unknown settings: the name here, why the setting does not exist, or the nearest
name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from asyncrl.config.moved import MOVED, OR
from asyncrl.config.offline_aliases import OFFLINE_NOT_IMPLEMENTED, OFFLINE_RENAMED, TURN_NAMES

VALUE_CLIP = (
    "a batch is trained once, so a clip around the values before the step never acts; remove it"
)
SERVED_REWARD_MODEL = "reward.functions: asyncrl.rewards.builtin:reward_model"
WHOLE_VERSIONS = (
    "the reference policy takes whole versions (algorithm.reference.update_interval); remove it"
)

RENAMED = {
    "agent_func_path": "environment.function",
    "max_rollout_turns": "environment.max_turns",
    "max_tool_calling_iterations": "environment.max_turns",
    "multi_turn": "environment.function",
    "tool_config_path": "environment.function, which gives its tools to the model",
    "ref_model_sync_steps": "algorithm.reference.update_interval",
    "sync_ref_model": "algorithm.reference.update_interval, with a number of versions",
    "use_peft": "lora.r, for an adapter of that rank",
    "peft_config": "lora.r, lora.alpha and lora.target_modules",
    "lora_r": "lora.r",
    "lora_rank": "lora.r",
    "lora.rank": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_adapter_path": "lora.load",
    "adapter_name_or_path": "lora.load",
    "lora_target_modules": "lora.target_modules",
    "normalise": "algorithm.correction.truncation.normalize",
    "rollout_max_response_len": "rollout.max_completion_length",
    "rollout_max_prompt_len": "data.max_prompt_length",
    "rollout_max_context_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "max_new_tokens": "rollout.max_completion_length",
    "max_target_length": "rollout.max_completion_length",
    "truncation_mode": "data.length_policy.side",
    "truncation_side": "data.length_policy.side",
    "rollout_temperature": "rollout.temperature",
    "sglang_mem_fraction_static": "generator.gpu_memory_utilization",
    "vllm_gpu_memory_utilization": "generator.gpu_memory_utilization",
    "rollout_num_gpus": "generator.num_replicas",
    "rollout_num_gpus_per_engine": "generator.tensor_parallel_size",
    "vllm_tensor_parallel_size": "generator.tensor_parallel_size",
    "pipeline_model_parallel_size": (
        "generator.pipeline_parallel_size (a learner rank computes all layers)"
    ),
    "expert_model_parallel_size": (
        "generator.expert_parallel: true (a learner rank has a part of every expert)"
    ),
    "expert_parallel_size": (
        "generator.expert_parallel: true (a learner rank has a part of every expert)"
    ),
    "vllm_enable_expert_parallel": "generator.expert_parallel",
    "enable_expert_parallel": "generator.expert_parallel",
    "actor_num_gpus_per_node": "learner.world_size",
    "context_parallel_size": "learner.sequence_parallel_size",
    "cp_size": "learner.sequence_parallel_size",
    "optimizer_cpu_offload": "learner.offload_optimizer",
    "recompute_granularity": "learner.gradient_checkpointing",
    "prompt_data": "data.train",
    "dataset_name": "data.train",
    "dataset_config": "data.train",
    "dataset_train_split": "data.train",
    "dataset_test_split": "eval.data",
    "dataset_mixture": "data.train",
    "prompt_data_weights": "data.train",
    "input_key": "data.prompt_column",
    "apply_chat_template_kwargs": "data.chat_template_kwargs",
    "tool_key": "data.tools_column",
    "system_message": "data.system_prompt",
    "stop": "rollout.rollout_stop",
    "stop_strings": "rollout.rollout_stop",
    "stop_token_ids": "rollout.rollout_stop_token_ids",
    "hf_checkpoint": "model.path",
    "model_name_or_path": "model.path",
    "save_interval": "checkpoint.every_steps",
    "num_generations": "rollout.n_samples_per_prompt",
    "custom_rm_path": "reward.functions",
    "rm_type": "reward.functions",
    "rm_url": "reward.functions",
    "reward_funcs": "reward.functions",
    "reward_weights": "reward.functions",
    "sandbox_fusion_url": "reward.sandbox.service",
    "e2b_router_url": "reward.sandbox.service",
    "code_provider": "reward.sandbox.level",
    "colocate": "placement: colocate",
    "colocate_all": "placement: colocate",
    "colocate_all_models": "placement: colocate",
    "colocate_actor_ref": "placement: share, with algorithm.reference.gpu_memory_utilization",
    "hybrid_engine": "placement: colocate",
    "memory_limit_mb": "reward.sandbox.memory_bytes",
    "lr": "learner.learning_rate",
    "lr_decay_style": "learner.schedule",
    "loss_type": "algorithm.loss, or algorithm.preference.loss for online DPO",
    "online_dpo": "algorithm.preference",
    "teacher_model": "algorithm.distillation.teacher",
    "teacher_model_name_or_path": "algorithm.distillation.teacher",
    "loss_top_k": "algorithm.distillation.use.top_k",
    "judge": "reward.functions, with asyncrl.rewards.builtin:pairwise_judge",
    "loss_agg_mode": "algorithm.loss_aggregation",
    "advantage_estimator": "algorithm.advantage",
    "use_tis": "algorithm.correction.truncation",
    "tis_clip": "algorithm.correction.truncation.cap",
    "over_sampling_batch_size": "staleness.on_stale.over_sampling",
    "epsilon": "algorithm.loss.eps_clip",
    "epsilon_high": "algorithm.loss.eps_clip_high",
    "beta": "algorithm.reference.kl_loss_coef, or algorithm.preference.loss.beta for online DPO",
    "kl_loss_type": "algorithm.reference.estimator",
    "use_wandb": "observe.sinks",
    "report_to": "observe.sinks",
    "wandb_project": "observe.project",
    "clip_grad": "learner.max_grad_norm",
    "enable_fp32_lm_head": "learner.cast_lm_head_to_fp32",
    "critic_lr": "algorithm.advantage.value_learning_rate",
    "eval_interval": "eval.every_steps",
    "eval_prompt_data": "eval.sets",
    "n_samples_per_eval_prompt": "eval.sets",
    "eval_temperature": "eval.sets",
    "eval_top_p": "eval.sets",
    "eval_top_k": "eval.sets",
    "eval_max_response_len": "eval.sets",
    "use_dynamic_batch_size": (
        "nothing: dynamic batching is always on, capped by learner.max_tokens_per_gpu"
    ),
    "padding_free": "nothing: rows are packed and never padded",
    "balance_data": "nothing: micro-batches are always balanced over the ranks",
    "micro_batch_size": (
        "nothing: a micro-batch takes as many rows as fit in learner.max_tokens_per_gpu"
    ),
    "gradient_accumulation_steps": (
        "nothing: a step is one batch, split into micro-batches by learner.max_tokens_per_gpu"
    ),
    "check_for_nan_in_loss_and_grad": (
        "nothing: a step with NaN or Inf is always skipped by all ranks, and"
        " learner.max_skipped_steps in a row end the run"
    ),
    "n": "rollout.n_samples_per_prompt",
    "num_samples_per_prompt": "rollout.n_samples_per_prompt",
    "num_generations_per_prompt": "rollout.n_samples_per_prompt",
    "num_return_sequences": "rollout.n_samples_per_prompt",
    "train_batch_size": (
        "rollout.rollout_batch_size, in prompts of a round (rollout.global_batch_size counts the"
        " trajectories of a step)"
    ),
    "ppo_mini_batch_size": (
        "rollout.global_batch_size, in trajectories of a step, or rollout.num_steps_per_rollout"
    ),
    "mini_batch_size": (
        "rollout.global_batch_size, in trajectories of a step, or rollout.num_steps_per_rollout"
    ),
    "generation_batch_size": "rollout.rollout_batch_size, in prompts of a round",
    "steps_per_generation": "rollout.num_steps_per_rollout",
    "rollout.batch_size": "rollout.rollout_batch_size",
    "train.batch_size": "rollout.global_batch_size",
    "num_rollout": "max_steps, in optimizer steps",
    "total_training_steps": "max_steps",
    "total_rollout_steps": "max_steps, in optimizer steps",
    "max_num_steps": "max_steps",
    "total_epochs": "max_steps: data repeats, reshuffled, until max_steps",
    "num_train_epochs": "max_steps: data repeats, reshuffled, until max_steps",
    "num_epoch": "max_steps: data repeats, reshuffled, until max_steps",
    "num_epochs": "max_steps: data repeats, reshuffled, until max_steps",
    "num_episodes": "max_steps: data repeats, reshuffled, until max_steps",
    "max_response_length": "rollout.max_completion_length",
    "response_length": "rollout.max_completion_length",
    "generate_max_len": "rollout.max_completion_length",
    "max_tokens": "rollout.max_completion_length",
    "prompt_max_len": "data.max_prompt_length",
    "prompt_length": "data.max_prompt_length",
    "max_len": "data.max_length",
    "max_model_len": "data.max_length",
    "vllm_max_model_length": "data.max_length",
    "data.truncation": "data.prompt_policy",
    "filter_overlong_prompts": "data.prompt_policy: drop",
    "train_files": "data.train",
    "train_path": "data.train",
    "prompt_dataset": "data.train",
    "prompt_split": "data.train",
    "prompt_probs": "data.train",
    "dataset_path": "data.train",
    "train_dataset": "data.train",
    "prompt_key": "data.prompt_column",
    "input_template": "data.system_prompt, or the model's chat template",
    "val_files": "eval.data",
    "eval_dataset": "eval.data",
    "eval.dataset": "eval.data",
    "test_files": "eval.data",
    "shuffle_dataset": "data.shuffle",
    "rollout_shuffle": "data.shuffle",
    "rollout_seed": "seed",
    "return_raw_chat": "nothing: rewards receive the messages as given, as `messages`",
    "label_key": "nothing: every other column of a row reaches the reward under its own name",
    "reward_fn_key": "nothing: every other column of a row reaches the reward under its own name",
    "metadata_key": "nothing: every other column of a row reaches the reward under its own name",
    "model_name": "model.path",
    "pretrain": "model.path",
    "model_path": "model.path",
    "torch_dtype": "model.dtype",
    "model_dtype": "model.dtype",
    "param_dtype": "learner.bf16",
    "learning_rate_critic": "algorithm.advantage.value_learning_rate",
    "actor_learning_rate": "learner.learning_rate",
    "critic_learning_rate": "algorithm.advantage.value_learning_rate",
    "optim.lr": "learner.learning_rate",
    "lr_warmup_steps": "learner.schedule.warmup_steps",
    "lr_warmup_iters": "learner.schedule.warmup_steps",
    "lr_scheduler": "learner.schedule",
    "max_norm": "learner.max_grad_norm",
    "grad_clip": "learner.max_grad_norm",
    "adam_offload": "learner.offload_optimizer",
    "optimizer_offload": "learner.offload_optimizer",
    "param_offload": "learner.offload_param",
    "adam_beta1": "learner.optimizer.betas",
    "adam_beta2": "learner.optimizer.betas",
    "betas": "learner.optimizer.betas",
    "enable_gradient_checkpointing": "learner.gradient_checkpointing",
    "gradient_checkpointing_enable": "learner.gradient_checkpointing",
    "ppo_max_token_len_per_gpu": "learner.max_tokens_per_gpu",
    "max_token_len_per_gpu": "learner.max_tokens_per_gpu",
    "train_max_tokens_per_gpu": "learner.max_tokens_per_gpu",
    "ulysses_sequence_parallel_size": "learner.sequence_parallel_size",
    "ring_attn_size": "learner.sequence_parallel_size",
    "n_gpus_per_node": "learner.world_size, over all nodes",
    "num_gpus_per_node": "learner.world_size, over all nodes",
    "actor_num_nodes": "learner.world_size, over all nodes",
    "nnodes": "learner.world_size, over all nodes; generator.nnodes is for one engine",
    "rollout.nnodes": "generator.num_replicas, over all nodes; generator.nnodes is for one engine",
    "rollout.n_gpus_per_node": "generator.num_replicas, over all nodes",
    "trainer_num_gpus": "learner.world_size",
    "log_probs_chunk_size": "learner.logprob_memory_bytes",
    "vllm_num_engines": "generator.num_replicas",
    "num_engines": "generator.num_replicas",
    "sglang_max_running_requests": "generator.max_num_seqs",
    "max_running_requests": "generator.max_num_seqs",
    "partial_rollout": (
        "generator.in_flight: keep (generations always continue across a weight update)"
    ),
    "partial_rollout_enable": (
        "generator.in_flight: keep (generations always continue across a weight update)"
    ),
    "mask_offpolicy_in_partial_rollout": "staleness.on_stale: mask",
    "vllm_mode": "placement: share or colocate; generator.attach for a standing server",
    "use_vllm": "nothing: vLLM always generates",
    "sglang_server_concurrency": "rollout.max_concurrency",
    "rollout_health_check_interval": "generator.stall_timeout_s",
    "update_weight_buffer_size": "weights.bucket_bytes",
    "adv_estimator": "algorithm.advantage",
    "advantage.estimator": "algorithm.advantage",
    "estimator": "algorithm.advantage",
    "scale_rewards": (
        "algorithm.advantage (dr_grpo for none, grpo_batch_std for batch, grpo for group)"
    ),
    "norm_adv_by_std_in_grpo": "algorithm.advantage: dr_grpo for false",
    "disable_grpo_std_normalization": "algorithm.advantage: dr_grpo",
    "no_std_norm": "algorithm.advantage: dr_grpo",
    "policy_loss_type": "algorithm.loss",
    "custom_loss_function_path": "algorithm.loss: package.module:function",
    "custom_advantage_function_path": "algorithm.advantage: package.module:function",
    "loss_mode": "algorithm.loss",
    "importance_sampling_level": "algorithm.loss: gspo for sequences",
    "clip_ratio": "algorithm.loss.eps_clip",
    "clip_ratio_low": "algorithm.loss.eps_clip",
    "clip_ratio_high": "algorithm.loss.eps_clip_high",
    "clip_ratio_c": "algorithm.loss.dual_clip",
    "eps_clip_c": "algorithm.loss.dual_clip",
    "delta": "algorithm.loss.dual_clip",
    "eps_clip_low_high": "algorithm.loss.eps_clip and algorithm.loss.eps_clip_high",
    "sapo_temperature_pos": "algorithm.loss.tau_positive",
    "sapo_temperature_neg": "algorithm.loss.tau_negative",
    "vespo_k_pos": "algorithm.loss.k_positive",
    "vespo_k_neg": "algorithm.loss.k_negative",
    "vespo_lambda_pos": "algorithm.loss.lambda_positive",
    "vespo_lambda_neg": "algorithm.loss.lambda_negative",
    "vespo.k_pos": "algorithm.loss.k_positive",
    "vespo.k_neg": "algorithm.loss.k_negative",
    "vespo.lambda_pos": "algorithm.loss.lambda_positive",
    "vespo.lambda_neg": "algorithm.loss.lambda_negative",
    "clip_cov_ratio": "algorithm.loss.cov_share",
    "clip_cov_lb": "algorithm.loss.clip_cov_low",
    "clip_cov_ub": "algorithm.loss.clip_cov_high",
    "kl_cov_ratio": "algorithm.loss.cov_share",
    "ppo_kl_coef": "algorithm.loss.kl_cov_coef",
    "multi_objective_aggregation": "algorithm.advantage: gdpo for normalize_then_sum",
    "rollout_is_level": "algorithm.correction.truncation",
    "lam": "algorithm.advantage.gae_lambda",
    "lambd": "algorithm.advantage.gae_lambda",
    "step_advantage_w": "algorithm.advantage.turns.coef",
    "gigpo.step_advantage_w": "algorithm.advantage.turns.coef",
    "entropy_coeff": "algorithm.entropy_coef",
    "use_kl_loss": "algorithm.reference.kl_loss_coef (no algorithm.reference: none)",
    "use_kl_in_reward": "algorithm.reference.kl_coef (no algorithm.reference: none)",
    "init_kl_coef": "algorithm.reference.kl_coef",
    "kl_ctrl.kl_coef": "algorithm.reference.kl_coef",
    "kl.init_coef": "algorithm.reference.kl_coef",
    "kl_penalty": "algorithm.reference.estimator",
    "kl.estimator": "algorithm.reference.estimator",
    "ref_path": "algorithm.reference.ref_load",
    "ref_model": "algorithm.reference.ref_load",
    "use_rollout_logprobs": "algorithm.loss.old_policy: behavior",
    "use_rollout_log_probs": "algorithm.loss.old_policy: behavior",
    "dynamic_sampling_filter_path": "algorithm.group_filter",
    "dynamic_filtering_enable": "algorithm.filter_zero_variance",
    "filter_groups": "algorithm.filter_zero_variance",
    "rollout_is": "algorithm.correction.truncation",
    "rollout_is_threshold": "algorithm.correction.truncation.cap",
    "rollout_rs": "algorithm.correction.rejection.estimator",
    "rollout_rs_threshold": "algorithm.correction.rejection.above",
    "is_correction_enable": "algorithm.correction.truncation",
    "is_correction_threshold": "algorithm.correction.truncation.cap",
    "enable_vllm_is_correction": "algorithm.correction.truncation",
    "vllm_importance_sampling_correction": "algorithm.correction.truncation",
    "vllm_importance_sampling_mode": "algorithm.correction.truncation",
    "vllm_importance_sampling_cap": "algorithm.correction.truncation.cap",
    "vllm_importance_sampling_clip_max": "algorithm.correction.truncation.cap",
    "vllm_importance_sampling_clip_min": (
        "algorithm.correction.truncation.floor, or correction.band.below to mask"
    ),
    "off_policy_mask_threshold": "algorithm.correction.sequence_mask.above",
    "mask_truncated_completions": (
        "reward.overlong.buffer, or a reward that returns None for truncated completions"
    ),
    "reward_function": "reward.functions",
    "custom_reward_function": "reward.functions",
    "remote_rm_url": SERVED_REWARD_MODEL,
    "remote_url": "reward.functions",
    "reward_model": SERVED_REWARD_MODEL,
    "reward_pretrain": SERVED_REWARD_MODEL,
    "reward_model_path": SERVED_REWARD_MODEL,
    "reward_manager": "reward.functions",
    "overlong_buffer_len": "reward.overlong.buffer",
    "overlong_penalty_factor": "reward.overlong.penalty",
    "staleness_threshold": "staleness.max_staleness, in versions",
    "max_head_offpolicyness": "staleness.max_staleness",
    "max_off_policy_steps": "staleness.max_staleness",
    "max_async_level": "staleness.max_staleness",
    "async_queue_size": "staleness.max_staleness",
    "async_level": "staleness.max_staleness",
    "save_steps": "checkpoint.every_steps",
    "save_freq": "checkpoint.every_steps",
    "max_ckpt_num": "checkpoint.keep",
    "max_num": "checkpoint.keep",
    "max_actor_ckpt_to_keep": "checkpoint.keep",
    "save_total_limit": "checkpoint.keep",
    "default_local_dir": "checkpoint.save",
    "save_path": "checkpoint.save",
    "ckpt_path": "checkpoint.save",
    "output_dir": "runs_root and name",
    "resume_mode": "resume",
    "resume_from_checkpoint": "resume",
    "resume_from_path": "checkpoint.load",
    "load_checkpoint": "resume",
    "ref_ckpt_step": "algorithm.reference.ref_load",
    "eval_steps": "eval.every_steps",
    "test_freq": "eval.every_steps",
    "val_period": "eval.every_steps",
    "val_batch_size": "eval.max_prompts",
    "eval_n_samples_per_prompt": "eval.sets",
    "experiment_name": "name",
    "exp_name": "name",
    "run_name": "name",
    "trial_name": "name",
    "project_name": "observe.project",
    "tb_project_name": "observe.project",
    "logger": "observe.sinks",
    "use_tensorboard": "nothing: TensorBoard files are always written",
    "tensorboard_dir": "nothing: TensorBoard files are always written, into the run directory",
    "pad_to_multiple_of": "nothing: rows are packed and never padded",
    "use_remove_padding": "nothing: rows are packed and never padded",
    "packing_samples": "nothing: rows are always packed where the model allows it",
    "use_dynamic_bsz": (
        "nothing: dynamic batching is always on, capped by learner.max_tokens_per_gpu"
    ),
    "dynamic_batch_enable": (
        "nothing: dynamic batching is always on, capped by learner.max_tokens_per_gpu"
    ),
    "balance_batch": "nothing: micro-batches are always balanced over the ranks",
    "balance_by_flops": (
        "nothing: micro-batches are always balanced over the ranks, by their quadratic cost"
    ),
    "ppo_micro_batch_size_per_gpu": (
        "nothing: a micro-batch takes as many rows as fit in learner.max_tokens_per_gpu"
    ),
    "micro_train_batch_size": (
        "nothing: a micro-batch takes as many rows as fit in learner.max_tokens_per_gpu"
    ),
    "per_device_train_batch_size": (
        "nothing: a micro-batch takes as many rows as fit in learner.max_tokens_per_gpu"
    ),
    "ppo_micro_batch_size": (
        "nothing: a micro-batch takes as many rows as fit in learner.max_tokens_per_gpu"
    ),
    "log_prob_micro_batch_size_per_gpu": (
        "nothing: a micro-batch takes as many rows as fit in learner.max_tokens_per_gpu"
    ),
    "micro_rollout_batch_size": (
        "nothing: a micro-batch takes as many rows as fit in learner.max_tokens_per_gpu"
    ),
    "zero_stage": "nothing: the learner always uses DeepSpeed ZeRO-3",
    "use_fault_tolerance": (
        "nothing: lost generators and ranks are always replaced, at most max_restarts times"
    ),
    "async_save": "nothing: generation continues while a checkpoint is written",
    "disable_dropout": "nothing: dropout is always off",
    "ds3_gather_for_generation": (
        "nothing: generators receive weights in buckets of weights.bucket_bytes, so no rank gathers"
        " the whole model"
    ),
    "enable_prefix_caching": "nothing: prefix caching is always on",
    "log_completions": (
        "nothing: all completions are saved, in groups/*.parquet of the run directory"
    ),
    "async_enable": "staleness.max_staleness (0: synchronous)",
    "critic.optim.lr": "algorithm.advantage.value_learning_rate",
    "critic.model.path": "nothing: the value head is part of the policy (algorithm.advantage: gae)",
    "rollout.name": "nothing: vLLM always generates",
    "rollout.mode": "nothing: generation is always asynchronous",
    "actor.strategy": "nothing: the learner always uses DeepSpeed ZeRO-3",
    "custom_reward_function.path": "reward.functions: package.module:function",
    "custom_reward_function.name": "reward.functions: package.module:function",
    "reward_model.enable": "reward.functions",
    "reward_model.path": SERVED_REWARD_MODEL,
    "reward_model.model.path": SERVED_REWARD_MODEL,
    "warmup_ratio": "learner.schedule.warmup_steps, in steps",
    "lr_warmup_ratio": "learner.schedule.warmup_steps, in steps",
    "lr_warmup_steps_ratio": "learner.schedule.warmup_steps, in steps",
    "save_strategy": "checkpoint.every_steps",
    "eval_strategy": "eval.every_steps",
    "recompute_method": "learner.gradient_checkpointing",
    "recompute_num_layers": "learner.gradient_checkpointing",
    "async_train": "staleness.max_staleness (0: synchronous)",
    "val_before_train": "nothing: an evaluation always runs before and after training",
    "logging_steps": "nothing: every step is recorded",
    "attention_dropout": "nothing: dropout is always off",
    "hidden_dropout": "nothing: dropout is always off",
    "flash_attn": "nothing: the learner's attention follows from its model and device",
    "attn_implementation": "nothing: the learner's attention follows from its model and device",
    "attention_backend": "nothing: the learner's attention follows from its model and device",
    "remove_unused_columns": (
        "nothing: every other column of a row reaches the reward under its own name"
    ),
    "vllm_sync_backend": "nothing: weights go through Ray's object store",
}
"""Settings of slime, TRL, verl and OpenRLHF → the name here. A key may be several last parts of a
dotted name; the longest match is used."""

NOT_NEEDED = "nothing: "
"""Start of a value of RENAMED whose setting has no counterpart here, before the reason."""

TURNS = (
    "placement: colocate decides it: on GPUs, the side that waits frees its memory; remove it, and"
    " set that"
)

NOT_IMPLEMENTED = {
    "activation_offloading": (
        "activations stay on the model's device; remove it, and use learner.gradient_checkpointing"
    ),
    "chat_template_path": (
        "the chat template comes from model.path's tokenizer; save yours there as"
        " chat_template.jinja, and remove this"
    ),
    **dict.fromkeys(TURN_NAMES, TURNS),
    "tensor_model_parallel_size": (
        "a learner rank computes whole layers; remove it, or set generator.tensor_parallel_size for"
        " the generators"
    ),
    "data_parallel_size": (
        "it follows from generator.num_replicas and learner.world_size; remove it, and set those"
    ),
    "lora_dropout": "the learner uses no dropout; remove it",
    "lora_modules_to_save": "an adapter has low-rank matrices only; remove it",
    "modules_to_save": "an adapter has low-rank matrices only; remove it",
    "freeze_params_name_list": "all weights are trained; remove it",
    "load_in_4bit": "weights are loaded in model.dtype; remove it",
    "load_in_8bit": "weights are loaded in model.dtype; remove it",
    "quantization": "weights are loaded in model.dtype; remove it",
    "fp16": "the learner computes in float32 or in bfloat16 (learner.bf16); remove it",
    "num_iterations": (
        "a batch is trained once; remove it, and set rollout.num_steps_per_rollout for more steps"
        " in a round"
    ),
    "ppo_epochs": (
        "a batch is trained once; remove it, and set rollout.num_steps_per_rollout for more steps"
        " in a round"
    ),
    "max_epochs": (
        "a batch is trained once; remove it, and set rollout.num_steps_per_rollout for more steps"
        " in a round"
    ),
    "ref_model_mixup_alpha": WHOLE_VERSIONS,
    "enable_ema": WHOLE_VERSIONS,
    "ema_beta": WHOLE_VERSIONS,
    "custom_generate_function_path": "there is no setting for such a function; remove it",
    "rollout_function_path": "there is no setting for such a function; remove it",
    "custom_tis_function_path": "there is no setting for such a function; remove it",
    "image_key": "prompts are text; remove it",
    "video_key": "prompts are text; remove it",
    "multimodal_keys": "prompts are text; remove it",
    "limit_images": "prompts are text; remove it",
    "sglang_server_base_url": "generators are vLLM engines; remove it",
    "rollout_external_engine_addrs": "generators are vLLM engines; remove it",
    "critic_warmup": "the policy is trained from the first step; remove it",
    "enforce_eager": "vLLM chooses compilation by its device; remove it",
    "push_to_hub": "a run uploads nothing; remove it, and upload the output of asyncrl export",
    "max_samples": "all rows are used; remove it, and end with max_steps",
    "normalize_reward": "algorithm.advantage decides how rewards are normalized; remove it",
    "ref_num_nodes": "the reference policy has one process; remove it",
    "ref_num_gpus_per_node": "the reference policy has one process; remove it",
    "sequence_parallel": (
        "a learner rank computes whole layers; remove it, or split long rows with"
        " learner.sequence_parallel_size"
    ),
    "cliprange_value": VALUE_CLIP,
    "value_clip": VALUE_CLIP,
    "value_eps_clip": VALUE_CLIP,
}
"""Settings of other systems that asyncrl does not implement → the reason and the fix."""

LIKENESS = 0.8
"""Similarity (`difflib`, 0 to 1) that a known name needs before it is suggested."""


def explain_unknown(name: str, known: Sequence[str]) -> str:
    """One line about a setting that is not among the `known` dotted names: its name here, why it
    does not exist, or the nearest name."""
    offline = "objective" in known
    lines = [line for line in MOVED.get(name, "").split(OR) if line.partition(":")[0] in known]
    if lines:
        return f"{name} has moved; write {OR.join(lines)}"
    for ending in _endings(name):
        if offline and (here := OFFLINE_RENAMED.get(ending)) is not None:
            return _renamed(name, here)
        why = (OFFLINE_NOT_IMPLEMENTED.get(ending) if offline else None) or NOT_IMPLEMENTED.get(
            ending
        )
        if why is not None:
            return f"{name} is not implemented: {why}"
        here = RENAMED.get(ending)
        if here is not None and (not offline or _exists(here, known)):
            return _renamed(name, here)
    if name in known:  # one key with dots in it
        return f"{name} is one key; write {name.replace('.', ': {')}: …{'}' * name.count('.')}"
    near = _nearest(name.replace("-", "_"), known)
    return f"{name} is unknown; " + (
        f"did you mean {near}?" if near else f"see asyncrl {'sft' if offline else 'train'} --help"
    )


def _renamed(name: str, here: str) -> str:
    if here.startswith(NOT_NEEDED):
        return f"{name} is unknown and not needed: {here[len(NOT_NEEDED) :]}; remove it"
    return f"{name} is unknown; asyncrl calls it {here}"


def _exists(here: str, known: Sequence[str]) -> bool:
    """Whether the first setting that a value of RENAMED names exists in this kind of config."""
    return here.startswith(NOT_NEEDED) or here.split(" ")[0].rstrip(",:;") in known


def _endings(name: str) -> list[str]:
    """Keys of the tables that a dotted name can match, longest first. The last one is without
    slime's prefix."""
    parts = name.replace("-", "_").split(".")
    return [".".join(parts[begin:]) for begin in range(len(parts))] + [
        parts[-1].removeprefix("rollout_")
    ]


def _nearest(name: str, known: Sequence[str]) -> str | None:
    """The setting whose last part is most similar to this name's. The whole name decides between
    equals. Sections are never suggested."""
    settings = [key for key in known if not any(other.startswith(f"{key}.") for other in known)]
    leaf = name.rpartition(".")[2].removeprefix("rollout_")
    ranked = [
        (
            _likeness(leaf, key.rpartition(".")[2].removeprefix("rollout_")),
            _likeness(name, key),
            key,
        )
        for key in settings
    ]
    best = max(ranked, default=(0.0, 0.0, ""))
    return best[2] if best[0] >= LIKENESS else None


def _likeness(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()
