"""Turn the config into the spec of each station."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asyncrl.algorithms.objective_spec import (
    CorrectionSpec,
    ObjectiveSpec,
    PreferenceSpec,
    RewardModelSpec,
    VespoSpec,
)
from asyncrl.algorithms.pairs import PairSpec
from asyncrl.config import AlgorithmConfig, Config, OfflineConfig
from asyncrl.contracts.protocols import Generate
from asyncrl.data.offline_spec import OfflineDataSpec
from asyncrl.data.spec import DataSpec
from asyncrl.frozen.spec import ReferenceSpec, RefreshSpec
from asyncrl.generation.settings import GeneratorApp
from asyncrl.learning.schedule import SAME, BatchSizes
from asyncrl.learning.spec import LearnerSpec
from asyncrl.observe.spec import ObserveSpec
from asyncrl.preflight.model_limits import model_vocabulary
from asyncrl.rewards.spec import ScoringSpec
from asyncrl.rollout.spec import SessionsSpec, WorkerSpec

__all__ = [
    "data_spec",
    "generator_app",
    "learner_spec",
    "objective_spec",
    "observe_spec",
    "offline_data_spec",
    "offline_learner_spec",
    "offline_reference_spec",
    "online_preference_spec",
    "pair_spec",
    "preference_spec",
    "reference_spec",
    "scoring_spec",
    "sessions_spec",
    "worker_spec",
]


def data_spec(config: Config) -> DataSpec:
    """The spec for reading prompts and supervised rows."""
    return DataSpec(
        data=config.data,
        eval=config.eval,
        warm_start=config.warm_start,
        model_path=config.model.path,
        max_completion_length=config.rollout.max_completion_length,
        seed=config.seed,
        sessions=config.environment is not None,
    )


def worker_spec(
    config: Config, run_id: str, attempt: int, generate: Callable[[], Generate]
) -> WorkerSpec:
    """The spec of a rollout worker.

    Args:
        generate: creates the generator in the worker.
    """
    return WorkerSpec(
        rollout=config.rollout,
        max_length=config.data.max_length,
        deadline_s=config.deadline_s,
        seed=config.seed,
        run_id=run_id,
        attempt=attempt,
        generate=generate,
        baseline=config.algorithm.needs_baseline,
        sessions=sessions_spec(config),
    )


def sessions_spec(config: Config) -> SessionsSpec | None:
    """The spec of sessions; None without an environment."""
    if config.environment is None:
        return None
    return SessionsSpec(
        environment=config.environment,
        model_path=config.model.path,
        max_length=config.longest_trajectory,
        rollout_stop=tuple(config.rollout.rollout_stop),
        rollout_stop_token_ids=tuple(config.rollout.rollout_stop_token_ids),
        variables=config.data.chat_template_kwargs,
    )


def scoring_spec(config: Config) -> ScoringSpec:
    """The spec of the scoring stream."""
    return ScoringSpec(
        reward=config.reward,
        algorithm=config.algorithm,
        max_completion_length=config.rollout.max_completion_length,
        max_length=config.data.max_length,
        longest_trajectory=config.longest_trajectory,
        train_ends=frozenset(config.environment.train_ends) if config.environment else None,
        most_session_tokens=(
            config.learner.max_tokens_per_row
            if config.environment and config.algorithm.compares_sequences
            else None
        ),
    )


def objective_spec(algorithm: AlgorithmConfig) -> ObjectiveSpec:
    """The spec of the policy loss."""
    correction = algorithm.correction
    return ObjectiveSpec(
        loss=algorithm.loss,
        old_policy=algorithm.old_policy,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.eps_clip_high,
        dual_clip=algorithm.dual_clip,
        tau_positive=algorithm.tau_positive,
        tau_negative=algorithm.tau_negative,
        dppo_threshold=algorithm.dppo_threshold,
        vespo=VespoSpec(
            k_positive=algorithm.vespo_k_positive,
            lambda_positive=algorithm.vespo_lambda_positive,
            k_negative=algorithm.vespo_k_negative,
            lambda_negative=algorithm.vespo_lambda_negative,
        ),
        kl_cov_coef=algorithm.kl_cov_coef,
        entropy_coef=algorithm.entropy_coef,
        kl_loss_coef=algorithm.kl_loss_coef,
        kl_estimator=algorithm.kl_estimator,
        value_coef=algorithm.value_coef,
        correction=CorrectionSpec(
            truncation=correction.truncation,
            cap=correction.cap,
            floor=correction.floor,
            mask_below=correction.mask_below,
            mask_above=correction.mask_above,
            reject_above=correction.reject_above,
            reject_estimator=correction.reject_estimator,
            reject_level=correction.reject_level,
            sequence_mask_above=correction.sequence_mask_above,
        ),
    )


def learner_spec(config: Config) -> LearnerSpec:
    """The spec of the learner's ranks."""
    return LearnerSpec(
        learner=config.learner,
        algorithm=config.algorithm,
        objective=objective_spec(config.algorithm),
        model_path=config.model.path,
        model_dtype=config.model.dtype,
        bucket_bytes=config.weights.bucket_bytes,
        temperature=config.rollout.temperature,
        max_completion_length=config.rollout.max_completion_length,
        longest_trajectory=config.longest_trajectory,
        max_steps=config.max_steps,
        seed=config.seed,
        shuffle_rewards=config.reward.shuffle,
        packing_strategy=config.warm_start.packing_strategy,
        placement_wait_s=config.placement_wait_s,
        run_directory=config.run_directory,
        preference=online_preference_spec(config.algorithm),
        pairs=pair_spec(config.algorithm),
        max_staleness=config.staleness.max_staleness,
        masks_stale=config.staleness.on_stale == "mask",
        rollout_stop=tuple(config.rollout.rollout_stop),
        rollout_stop_token_ids=tuple(config.rollout.rollout_stop_token_ids),
        chat_template_kwargs=config.data.chat_template_kwargs,
        lora=config.lora,
        gpus=config.rank_gpus,
        engine_memory=(
            config.generator.gpu_memory_utilization if config.takes_turns_on_gpus else None
        ),
    )


def online_preference_spec(algorithm: AlgorithmConfig) -> PreferenceSpec | None:
    """The spec of the loss of online DPO; None with a policy gradient."""
    preference = algorithm.preference
    if preference is None:
        return None
    return PreferenceSpec(
        loss=preference.loss,
        beta=preference.beta,
        ce_coef=preference.ce_coef,
        weight_cap=preference.weight_cap,
    )


def pair_spec(algorithm: AlgorithmConfig) -> PairSpec | None:
    """The pairs that online DPO chooses; None with a policy gradient."""
    preference = algorithm.preference
    if preference is None:
        return None
    return PairSpec(
        choice=preference.pairs,
        min_margin=preference.min_margin,
        max_pairs=preference.max_pairs,
        missing_eos_penalty=preference.missing_eos_penalty,
    )


def offline_data_spec(config: OfflineConfig) -> OfflineDataSpec:
    """The spec for turning a dataset into token rows."""
    data = config.data
    return OfflineDataSpec(
        model_path=config.model.path,
        vocabulary=model_vocabulary(config),
        max_length=data.max_length,
        length_policy=data.length_policy,
        length_side=data.length_side,
        malformed=data.malformed,
        loss_on=data.loss_on,
        apply_chat_template=data.apply_chat_template,
        chat_template_kwargs=data.chat_template_kwargs,
        system_prompt=data.system_prompt,
        tools=data.tools,
        tools_column=data.tools_column,
        prompt_column=data.prompt_column,
        target_column=data.target_column,
        unused_keys=data.unused_keys,
        least_reward=data.least_reward,
    )


def offline_learner_spec(
    config: OfflineConfig, steps: int, batch_sizes: BatchSizes = SAME
) -> LearnerSpec:
    """The spec of the learner's ranks in a run on a dataset.

    Args:
        steps: optimizer steps of the whole run, which the learning-rate schedule needs.
        batch_sizes: rows of each of these steps.
    """
    algorithm = AlgorithmConfig()
    return LearnerSpec(
        learner=config.learner,
        algorithm=algorithm,
        objective=objective_spec(algorithm),
        model_path=config.model.path,
        model_dtype=config.model.dtype,
        bucket_bytes=config.bucket_bytes,
        temperature=1.0,
        max_completion_length=config.data.max_length,
        longest_trajectory=config.longest_trajectory,
        max_steps=steps,
        seed=config.seed,
        shuffle_rewards=False,
        packing_strategy=config.sft.packing_strategy,
        placement_wait_s=config.placement_wait_s,
        run_directory=config.run_directory,
        length_setting="data.max_length",
        chat_template_kwargs=config.data.chat_template_kwargs,
        preference=preference_spec(config) if config.objective == "dpo" else None,
        reward_model=(
            RewardModelSpec(config.reward_model.center_coef) if config.trains_reward_model else None
        ),
        batch_sizes=batch_sizes,
        lora=config.lora,
        gpus=float(config.learner.device == "cuda"),
    )


def preference_spec(config: OfflineConfig) -> PreferenceSpec:
    """The spec of the loss of pairs."""
    dpo = config.dpo
    return PreferenceSpec(
        loss=dpo.loss,
        beta=dpo.beta,
        label_smoothing=dpo.label_smoothing,
        length_normalized=dpo.length_normalized,
        simpo_margin=dpo.simpo_margin,
        desirable_weight=dpo.desirable_weight,
        undesirable_weight=dpo.undesirable_weight,
        ce_coef=dpo.ce_coef,
    )


def offline_reference_spec(config: OfflineConfig) -> ReferenceSpec:
    """The spec of the reference policy in a run on a dataset."""
    return ReferenceSpec(
        learner=config.learner,
        path=config.reference_path,
        temperature=1.0,
        num_cpus=config.dpo.ref_num_cpus,
        gpus=float(config.learner.device == "cuda"),
    )


def reference_spec(config: Config, place: Path | None = None) -> ReferenceSpec:
    """The spec of the reference policy.

    Args:
        place: folder of its version, if it is refreshed (`asyncrl.frozen.kept`).
    """
    distillation = config.algorithm.distillation
    top_k = distillation.top_k if distillation is not None and distillation.uses_top_k else 0
    refresh = None
    if config.reference_interval is not None and place is not None:
        refresh = RefreshSpec(
            model_path=config.model.path,
            model_dtype=config.model.dtype,
            place=place,
            timeout_s=config.push_timeout_s,
        )
    return ReferenceSpec(
        learner=config.learner,
        path=config.reference_path,
        temperature=config.rollout.temperature,
        num_cpus=config.algorithm.ref_num_cpus,
        gpus=config.reference_gpus,
        gpu_memory_utilization=config.reference_gpus if config.shares_gpus else 1.0,
        top_k=top_k,
        vocabulary=model_vocabulary(config) if top_k else None,
        refresh=refresh,
    )


def generator_app(config: Config) -> GeneratorApp:
    """The Serve application for generators that the run starts."""
    adapters = (
        {}
        if config.lora is None
        else {"max_lora_rank": config.lora.r, "max_loras": config.max_loras}
    )
    return GeneratorApp(
        model=config.model.path,
        dtype=config.model.dtype,
        max_model_len=config.longest_trajectory,
        cache_block=_cache_block(config),
        generator=config.generator.model_copy(update={"max_num_seqs": config.max_num_seqs}),
        seed=config.seed,
        rollout_stop=config.rollout.rollout_stop,
        rollout_stop_token_ids=config.rollout.rollout_stop_token_ids,
        chat_template_kwargs=config.data.chat_template_kwargs,
        fetch_timeout_s=config.push_timeout_s,
        replace_after_s=config.push_timeout_s,
        num_gpus=config.replica_gpus if config.replicas_share_gpus else None,
        sleeps=config.takes_turns_on_gpus,
        **adapters,
    )


def _cache_block(config: Config) -> int | None:
    """Tokens of a KV cache block. A turn reuses whole blocks of the turns before it. vLLM's default
    on CPU, 128 tokens, would be too large for many sessions."""
    on_cpu = config.generator.device == "cpu"
    return 32 if config.environment is not None and on_cpu else None


def observe_spec(config: Config) -> ObserveSpec:
    """The spec of the live table, the alarms and the summary."""
    return ObserveSpec(
        max_steps=config.max_steps,
        max_staleness=config.staleness.max_staleness,
        rewards=tuple(config.reward.functions),
        accuracy=config.accuracy,
        is_accuracy=config.eval.accuracy is not None,
        evaluation_sets=tuple(config.evaluation_sets),
        cuts_distribution=config.rollout.cuts_distribution,
        completions_every=config.observe.completions_every,
        trained_ends=tuple(config.environment.train_ends) if config.environment else (),
    )
