"""The settings of a run that the learner's ranks get."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl.algorithms.objective_spec import ObjectiveSpec
from asyncrl.config import AlgorithmConfig, LearnerConfig
from asyncrl.packing.packing import Strategy

__all__ = ["LearnerSpec"]


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """The settings of one run that its learner needs."""

    learner: LearnerConfig
    algorithm: AlgorithmConfig
    objective: ObjectiveSpec
    model_path: str
    """Hugging Face checkpoint directory."""
    model_dtype: str
    """Dtype of the published weights."""
    bucket_bytes: int
    """Size of a bucket of published weights."""
    temperature: float
    """Sampling temperature of the rollouts. The learner's log-probs use it too, so they are those
    of the sampled distribution."""
    max_completion_length: int
    """Tokens."""
    longest_trajectory: int
    """Tokens of the longest possible trajectory."""
    max_steps: int
    seed: int
    shuffle_rewards: bool
    """Whether each batch's rewards are shuffled: a control experiment that must not learn."""
    packing_strategy: Strategy
    """How the warm start's rows are packed."""
    placement_wait_s: float
    """Seconds that the ranks may wait for resources."""
    run_directory: Path
