"""Turn the config into the spec of each station."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from asyncrl.algorithms.schedules import SAME, BatchSizes
from asyncrl.config import Config, OfflineConfig
from asyncrl.contracts.protocols import Generate
from asyncrl.data.spec import DataSpec, OfflineDataSpec
from asyncrl.generation.settings import GeneratorApp
from asyncrl.learning.frozen.spec import ReferenceSpec, RefreshSpec
from asyncrl.learning.spec import LearnerSpec, Objective, OnlineObjective
from asyncrl.observe.spec import ObserveSpec
from asyncrl.preflight.resources.model_limits import model_vocabulary
from asyncrl.rewards.spec import ScoringSpec
from asyncrl.rollout.spec import SessionsSpec, WorkerSpec


def data_spec(config: Config) -> DataSpec:
    """The spec for reading prompts and supervised rows."""
    return DataSpec(
        data=config.data,
        eval=config.eval,
        warm_start=config.warm_start,
        model=config.model,
        rollout=config.rollout,
        environment=config.environment,
        seed=config.seed,
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
        data=config.data,
        sessions=sessions_spec(config),
        deadline_s=config.deadline_s,
        needs_baseline=config.algorithm.needs_baseline,
        seed=config.seed,
        run_id=run_id,
        attempt=attempt,
        generate=generate,
    )


def sessions_spec(config: Config) -> SessionsSpec | None:
    """The spec of sessions; None without an environment."""
    if config.environment is None:
        return None
    return SessionsSpec(
        environment=config.environment,
        model=config.model,
        data=config.data,
        rollout=config.rollout,
        longest_trajectory=config.longest_trajectory,
    )


def scoring_spec(config: Config) -> ScoringSpec:
    """The spec of the scoring stream."""
    in_one_batch = config.environment is not None and config.algorithm.compares_sequences
    return ScoringSpec(
        reward=config.reward,
        algorithm=config.algorithm,
        rollout=config.rollout,
        data=config.data,
        environment=config.environment,
        longest_trajectory=config.longest_trajectory,
        most_session_tokens=config.learner.max_tokens_per_row if in_one_batch else None,
    )


def learner_spec(config: Config) -> LearnerSpec:
    """The spec of the learner's ranks."""
    objective = OnlineObjective(config.algorithm, config.rollout, config.reward, config.staleness)
    spec = _learner_spec(config, objective, config.max_steps)
    return replace(
        spec,
        packing_strategy=config.warm_start.packing_strategy.name if config.warm_start else "bfd",
        engine_share=config.engine_share if config.takes_shifts_on_gpus else None,
        records_tokens=config.limits.records_tokens,
    )


def offline_data_spec(config: OfflineConfig) -> OfflineDataSpec:
    """The spec for turning a dataset into token rows."""
    return OfflineDataSpec(config.data, config.model, model_vocabulary(config))


def offline_learner_spec(
    config: OfflineConfig, steps: int, batch_sizes: BatchSizes = SAME
) -> LearnerSpec:
    """The spec of the learner's ranks in a run on a dataset.

    Args:
        steps: optimizer steps of the whole run, which the learning-rate schedule needs.
        batch_sizes: rows of each of these steps.
    """
    spec = _learner_spec(config, config.objective, steps)
    packing = config.objective.packing_strategy
    return replace(spec, packing_strategy=packing, batch_sizes=batch_sizes)


def _learner_spec(config: Config | OfflineConfig, objective: Objective, steps: int) -> LearnerSpec:
    """The part of the learner's spec that every kind of run has."""
    return LearnerSpec(
        learner=config.learner,
        model=config.model,
        lora=config.lora,
        objective=objective,
        chat_template_kwargs=config.data.chat_template_kwargs,
        bucket_bytes=config.bucket_bytes,
        longest_trajectory=config.longest_trajectory,
        learning_rate=config.learning_rate,
        max_steps=steps,
        seed=config.seed,
        placement_wait_s=config.placement_wait_s,
        run_directory=config.run_directory,
        rank_share=config.rank_share,
        rank_gpus=config.rank_gpus,
    )


def offline_reference_spec(config: OfflineConfig) -> ReferenceSpec:
    """The spec of the reference policy in a run on a dataset."""
    assert config.compared is not None
    return ReferenceSpec(
        learner=config.learner,
        reference_path=config.reference_path,
        temperature=1.0,
        num_cpus=config.compared.ref_num_cpus,
        reference_gpus=config.rank_gpus,
    )


def reference_spec(config: Config, folder: Path | None = None) -> ReferenceSpec:
    """The spec of the reference policy.

    Args:
        folder: folder of its version, if it is refreshed
            (`asyncrl.learning.frozen.reference_files`).
    """
    assert config.algorithm.frozen is not None
    distillation = config.algorithm.distillation
    top_k = 0 if distillation is None else distillation.top_k
    refresh = None
    if config.reference_interval is not None and folder is not None:
        refresh = RefreshSpec(config.model, folder, config.push_timeout_s)
    return ReferenceSpec(
        learner=config.learner,
        reference_path=config.reference_path,
        temperature=config.rollout.temperature,
        num_cpus=config.algorithm.frozen.num_cpus,
        reference_gpus=config.reference_gpus,
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
                "in_flight": config.in_flight,
            }
        ),
        seed=config.seed,
        rollout_stop=config.rollout.rollout_stop,
        rollout_stop_token_ids=config.rollout.rollout_stop_token_ids,
        chat_template_kwargs=config.data.chat_template_kwargs,
        fetch_timeout_s=config.push_timeout_s,
        replace_after_s=config.push_timeout_s,
        num_gpus=config.replica_gpus if config.replicas_share_gpus else None,
        sleeps=config.takes_shifts_on_gpus,
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
        staleness=config.staleness,
        rollout=config.rollout,
        environment=config.environment,
        reward=config.reward,
        eval=config.eval,
        observe=config.observe,
        accuracy=config.accuracy,
        evaluation_sets=config.evaluation_sets,
    )
