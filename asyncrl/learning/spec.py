"""What the learner's ranks know of a run."""

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
    """Type of the published weights."""
    bucket_bytes: int
    """Bytes of one bucket of published weights."""
    temperature: float
    """Of the rollouts: log-probs are those of the distribution sampled from."""
    max_completion_length: int
    """Tokens."""
    longest_trajectory: int
    """Tokens of the longest possible trajectory."""
    max_steps: int
    seed: int
    shuffle_rewards: bool
    """Whether each batch's rewards are shuffled, a control that must learn nothing."""
    packing_strategy: Strategy
    """Of the warm start's rows."""
    placement_wait_s: float
    """Seconds that the ranks may wait for resources."""
    run_directory: Path
