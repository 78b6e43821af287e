"""The answer to a setting that the config does not have: its name here, why it is not there, or the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

__all__ = ["explain_unknown"]

RENAMED = {
    "rollout_max_response_len": "rollout.max_completion_length",
    "rollout_max_prompt_len": "data.max_prompt_length",
    "rollout_max_context_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "max_new_tokens": "rollout.max_completion_length",
    "max_target_length": "rollout.max_completion_length",
    "truncation_mode": "data.length_side",
    "truncation_side": "data.length_side",
    "rollout_temperature": "rollout.temperature",
    "sglang_mem_fraction_static": "generator.gpu_memory_utilization",
    "vllm_gpu_memory_utilization": "generator.gpu_memory_utilization",
    "rollout_num_gpus": "generator.num_replicas",
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
    "memory_limit_mb": "reward.sandbox.memory_bytes",
    "lr": "learner.learning_rate",
    "lr_decay_style": "learner.lr_scheduler_type",
    "loss_type": "algorithm.loss",
    "loss_agg_mode": "algorithm.loss_aggregation",
    "advantage_estimator": "algorithm.advantage",
    "use_tis": "algorithm.correction.truncation",
    "tis_clip": "algorithm.correction.cap",
    "over_sampling_batch_size": "staleness.over_sampling",
    "epsilon": "algorithm.eps_clip",
    "epsilon_high": "algorithm.eps_clip_high",
    "beta": "algorithm.kl_loss_coef",
    "kl_loss_type": "algorithm.kl_estimator",
    "use_wandb": "observe.sinks",
    "report_to": "observe.sinks",
    "wandb_project": "observe.project",
    "clip_grad": "learner.max_grad_norm",
    "enable_fp32_lm_head": "learner.cast_lm_head_to_fp32",
    "critic_lr": "learner.value_learning_rate",
    "eval_interval": "eval.every_steps",
    "eval_prompt_data": "eval.sets",
    "n_samples_per_eval_prompt": "eval.sets",
    "eval_temperature": "eval.sets",
    "eval_top_p": "eval.sets",
    "eval_top_k": "eval.sets",
    "eval_max_response_len": "eval.sets",
    "use_dynamic_batch_size": "nothing: dynamic batching is always on, capped by learner.max_tokens_per_gpu",
    "padding_free": "nothing: rows are packed and never padded",
    "balance_data": "nothing: micro-batches are always balanced over the ranks",
    "micro_batch_size": "nothing: a micro-batch holds as many rows as fit in learner.max_tokens_per_gpu",
    "gradient_accumulation_steps": "nothing: a step is one batch, in as many micro-batches as learner.max_tokens_per_gpu makes of it",
    "check_for_nan_in_loss_and_grad": "nothing: a step with NaN or Inf is always skipped by all ranks, and learner.max_skipped_steps in a row end the run",
}
"""Flags of slime and TRL → the name here."""

NOT_IMPLEMENTED = {
    "activation_offloading": "activations stay where the model is; remove it, and use learner.gradient_checkpointing",
    "chat_template_path": "the chat template is the one of model.path's tokenizer; put it there as chat_template.jinja, and remove this",
    "colocate": "generators and learner always have processes of their own; remove it",
}
"""Names known from elsewhere that nothing here implements → the way out."""


def explain_unknown(name: str, known: Sequence[str]) -> str:
    """One line on a setting that is not among the `known` dotted names: what it is called here, or the nearest."""
    leaf = name.rsplit(".", 1)[-1].replace("-", "_")
    leaf = leaf if leaf in RENAMED else leaf.removeprefix("rollout_")
    if leaf in NOT_IMPLEMENTED:
        return f"{name} is not implemented: {NOT_IMPLEMENTED[leaf]}"
    if leaf in RENAMED:
        return f"{name} is unknown; here it is {RENAMED[leaf]}"
    same_leaf = [other for other in known if other.rsplit(".", 1)[-1] == leaf]
    near = same_leaf or difflib.get_close_matches(name, known, n=1, cutoff=0.5) or _near_leaf(leaf, known)
    return f"{name} is unknown; " + (f"did you mean {near[0]}?" if near else "see asyncrl train --help")


def _near_leaf(leaf: str, known: Sequence[str]) -> list[str]:
    by_leaf = {other.rsplit(".", 1)[-1]: other for other in known}
    return [by_leaf[match] for match in difflib.get_close_matches(leaf, by_leaf, n=1)]
