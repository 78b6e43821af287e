"""Names of TRL, OpenRLHF and axolotl for the settings of a run on a dataset."""

from __future__ import annotations

__all__ = ["OFFLINE_NOT_IMPLEMENTED", "OFFLINE_RENAMED", "TURN_NAMES"]

ONE_LENGTH = "data.max_length, of the prompt and the completion together"
ONE_LOSS = "a run has one loss (dpo.loss), and dpo.ce_coef for the next-token loss; remove it"
REVERSE_KL = "the losses use the reverse KL divergence; remove it"
SCORED_ONCE = "nothing: the reference scores a dataset's pairs once, before training"

OFFLINE_RENAMED = {
    "beta": "dpo.beta",
    "loss_type": "dpo.loss",
    "label_smoothing": "dpo.label_smoothing",
    "rpo_alpha": "dpo.ce_coef",
    "nll_loss_coef": "dpo.ce_coef",
    "sft_loss_coef": "dpo.ce_coef",
    "simpo_gamma": "dpo.simpo_margin",
    "center_rewards_coefficient": "reward_model.center_coef",
    "desirable_weight": "dpo.desirable_weight",
    "undesirable_weight": "dpo.undesirable_weight",
    "ref_model": "dpo.ref_load",
    "ref_pretrain": "dpo.ref_load",
    "ref_load": "dpo.ref_load",
    "precompute_ref_log_probs": "nothing: the reference always scores the pairs once",
    "sync_ref_model": SCORED_ONCE,
    "ref_model_sync_steps": SCORED_ONCE,
    "ref_update_interval": SCORED_ONCE,
    "ref_model_mixup_alpha": SCORED_ONCE,
    "precompute_ref_batch_size": "dpo.reference_batch",
    "disable_dropout": "nothing: dropout is always off",
    "packing": "nothing: rows are always packed (learner.packing chooses how)",
    "packing_strategy": "sft.packing_strategy",
    "padding_free": "nothing: rows are always packed without padding",
    "pad_to_multiple_of": "nothing: rows are always packed without padding",
    "group_by_length": "nothing: rows are always packed without padding",
    "completion_only_loss": "data.loss_on: completion",
    "assistant_only_loss": "data.loss_on: assistant",
    "train_on_inputs": "data.loss_on: all",
    "train_on_prompt": "data.loss_on: all",
    "dataset_text_field": "nothing: the column text is recognized",
    "dataset_name": "data.train",
    "dataset_config": "data.train",
    "dataset_train_split": "data.train",
    "dataset_test_split": "eval.data",
    "eval_dataset": "eval.data",
    "train_dataset": "data.train",
    "datasets": "data.train",
    "input_key": "data.prompt_column",
    "output_key": "data.target_column",
    "max_seq_length": "data.max_length",
    "sequence_len": "data.max_length",
    "max_len": "data.max_length",
    "cutoff_len": "data.max_length",
    "truncation_mode": "data.length_side",
    "num_train_epochs": "num_epochs",
    "max_epochs": "num_epochs",
    "epochs": "num_epochs",
    "per_device_train_batch_size": "batch_size, over all ranks",
    "gradient_accumulation_steps": "batch_size, over all ranks; micro-batches fill automatically",
    "train_batch_size": "batch_size, over all ranks",
    "micro_train_batch_size": "learner.max_tokens_per_gpu, in tokens",
    "per_device_eval_batch_size": "learner.max_tokens_per_gpu, in tokens",
    "eval_steps": "eval.every_steps",
    "eval_strategy": "eval.every_steps",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "output_dir": "runs_root, with name",
    "resume_from_checkpoint": "resume: auto",
    "logging_steps": "nothing: every step is recorded",
    "report_to": "observe.sinks",
    "run_name": "name",
    "max_prompt_length": ONE_LENGTH,
    "max_completion_length": ONE_LENGTH,
    "reference_free": "dpo.loss: simpo, which has no reference",
    "generate_during_eval": "nothing: a run on a dataset samples no completions",
    "remove_unused_columns": "nothing: other columns of a row are not used",
    "dataset_num_proc": "nothing: rows become tokens in one pass, before training",
    "eval_packing": "nothing: rows are always packed (learner.packing chooses how)",
    "sample_packing": "nothing: rows are always packed (learner.packing chooses how)",
    "num_labels": "nothing: a reward model has one score",
    "use_logits_to_keep": "nothing: logits are only computed where they are needed",
    "average_tokens_across_devices": "nothing: a loss is a mean over the whole step",
    "deepspeed": "nothing: the learner always uses DeepSpeed ZeRO-3",
    "fsdp": "nothing: the learner always uses DeepSpeed ZeRO-3",
    "optim": "learner.optimizer",
    "base_model": "model.path",
    "nnodes": "learner.world_size, over all nodes",
    "val_set_size": "eval.data, with a file of its own",
    "use_liger_kernel": "nothing: the cross-entropy is always computed in chunks",
    "liger_kernel": "nothing: the cross-entropy is always computed in chunks",
}
"""Settings of other systems → the name here, as in `RENAMED` of `asyncrl.config.aliases`."""

WHOLE_LAYERS = "a learner rank computes whole layers; remove it, and use learner.world_size"

TURN_NAMES = (
    "offload_rollout",
    "offload_train",
    "vllm_enable_sleep",
    "vllm_enable_sleep_mode",
    "enable_sleep",
    "free_cache_engine",
)
"""Settings of other systems that free a GPU's memory while the other side works on it."""

OFFLINE_NOT_IMPLEMENTED = {
    **dict.fromkeys(
        (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "pipeline_model_parallel_size",
            "expert_parallel_size",
            "expert_model_parallel_size",
            "enable_expert_parallel",
        ),
        WHOLE_LAYERS,
    ),
    **dict.fromkeys(TURN_NAMES, "a run on a dataset has no generators; remove it"),
    "loss_weights": ONE_LOSS,
    "cpo_alpha": ONE_LOSS,
    "f_divergence_type": REVERSE_KL,
    "f_alpha_divergence_coef": REVERSE_KL,
    "use_weighting": "pairs of a dataset have equal weights; remove it",
    "discopop_tau": "the loss discopop is not there; remove it",
    "ld_alpha": "all tokens of a completion have weight 1; remove it",
    "neftune_noise_alpha": "embeddings get no noise; remove it",
    "formatting_func": "rows have the columns of a known form; write them so, and remove it",
    "eos_token": "the tokenizer of model.path has its own EOS; change that, and remove it",
    "pad_token": "rows are never padded; remove it",
    "model_init_kwargs": "a model is loaded from its files (model.path, model.dtype); remove it",
    "load_best_model_at_end": "hf/ has the last step; remove it, and use asyncrl export --step",
    "metric_for_best_model": "hf/ has the last step; remove it, and use asyncrl export --step",
    "trust_remote_code": "code in a checkpoint is never run; remove it",
    "early_stopping_patience": "a run ends after max_steps; remove it",
}
"""Settings of other systems that a run on a dataset does not implement → the reason and the
fix."""
