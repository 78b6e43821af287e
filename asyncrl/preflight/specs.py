"""Turn the config into the spec of each station."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asyncrl.algorithms.schedules import SAME, BatchSizes
from asyncrl.config import Config, OfflineConfig, PolicyGradient
from asyncrl.config.schema import Mask, side_of
from asyncrl.contracts.protocols import Generate
from asyncrl.data.offline_spec import OfflineDataSpec
from asyncrl.data.spec import DataSpec
from asyncrl.frozen.spec import ReferenceSpec, RefreshSpec
from asyncrl.generation.settings import GeneratorApp
from asyncrl.learning.spec import LearnerSpec
from asyncrl.observe.spec import ObserveSpec
from asyncrl.preflight.model_limits import model_vocabulary
from asyncrl.rewards.spec import ScoringSpec
from asyncrl.rollout.spec import SessionsSpec, WorkerSpec


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


def learner_spec(config: Config) -> LearnerSpec:
    """The spec of the learner's ranks."""
    return LearnerSpec(
        learner=config.learner.model_copy(update={"gpu_memory_utilization": config.rank_share}),
        algorithm=config.algorithm,
        model_path=config.model.path,
        model_dtype=config.model.dtype,
        bucket_bytes=config.weights.bucket_bytes,
        temperature=config.rollout.temperature,
        max_completion_length=config.rollout.max_completion_length,
        longest_trajectory=config.longest_trajectory,
        max_steps=config.max_steps,
        seed=config.seed,
        shuffle_rewards=config.reward.shuffle,
        packing_strategy=config.warm_start.packing_strategy.name if config.warm_start else "bfd",
        placement_wait_s=config.placement_wait_s,
        run_directory=config.run_directory,
        max_staleness=config.staleness.max_staleness,
        masks_stale=isinstance(config.staleness.on_stale, Mask),
        rollout_stop=tuple(config.rollout.rollout_stop),
        rollout_stop_token_ids=tuple(config.rollout.rollout_stop_token_ids),
        chat_template_kwargs=config.data.chat_template_kwargs,
        lora=config.lora,
        gpus=config.rank_gpus,
        engine_memory=(config.engine_share if config.takes_turns_on_gpus else None),
    )


def offline_data_spec(config: OfflineConfig) -> OfflineDataSpec:
    """The spec for turning a dataset into token rows."""
    data = config.data
    return OfflineDataSpec(
        model_path=config.model.path,
        vocabulary=model_vocabulary(config),
        max_length=data.max_length,
        length_policy=data.length_policy.name,
        length_side=side_of(data.length_policy),
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
    return LearnerSpec(
        learner=config.learner,
        algorithm=PolicyGradient(),
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
        dpo=config.dpo if config.objective == "dpo" else None,
        reward_model=config.reward_model if config.trains_reward_model else None,
        batch_sizes=batch_sizes,
        lora=config.lora,
        gpus=float(config.learner.device == "cuda"),
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
    assert config.algorithm.frozen is not None
    distillation = config.algorithm.distillation
    top_k = 0 if distillation is None else distillation.top_k
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
        num_cpus=config.algorithm.frozen.num_cpus,
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
        generator=config.engines.model_copy(
            update={
                "max_num_seqs": config.max_num_seqs,
                "gpu_memory_utilization": config.engine_share,
            }
        ),
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
    on_cpu = config.engines.device == "cpu"
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
