"""The settings of a run that the learner's ranks get."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from asyncrl.algorithms.advantages.gae import Gae
from asyncrl.algorithms.schedules import SAME, BatchSizes
from asyncrl.config import (
    AlgorithmConfig,
    DpoConfig,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    PolicyGradient,
    RewardConfig,
    RewardModelConfig,
    RolloutConfig,
    SftConfig,
    StalenessConfig,
)
from asyncrl.learning.packing.strategies import Strategy


@dataclass(frozen=True, slots=True)
class OnlineObjective:
    """What a run with generators trains, and on which groups."""

    algorithm: AlgorithmConfig
    rollout: RolloutConfig
    reward: RewardConfig
    staleness: StalenessConfig

    @property
    def has_reference(self) -> bool:
        """Whether a reference policy or teacher scores the groups."""
        return self.algorithm.has_reference

    @property
    def has_value_head(self) -> bool:
        """Whether the policy has a head for values."""
        algorithm = self.algorithm
        return isinstance(algorithm, PolicyGradient) and algorithm.advantage.of_each_token

    @property
    def value_learning_rate(self) -> float | None:
        """Peak learning rate of that head; None = that of the model."""
        algorithm = self.algorithm
        gae = isinstance(algorithm, PolicyGradient) and algorithm.advantage
        return gae.value_learning_rate if isinstance(gae, Gae) else None


Objective: TypeAlias = OnlineObjective | SftConfig | DpoConfig | RewardModelConfig


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """The settings of one run that its learner needs."""

    learner: LearnerConfig
    model: ModelConfig
    lora: LoraConfig | None
    objective: Objective
    chat_template_kwargs: dict[str, Any]
    bucket_bytes: int
    """Size of a bucket of published weights."""
    longest_trajectory: int
    """Tokens of the longest possible trajectory."""
    learning_rate: float
    """Peak learning rate."""
    max_steps: int
    seed: int
    placement_wait_s: float
    """Seconds that the ranks may wait for resources."""
    run_directory: Path
    rank_share: float
    """Largest fraction of a GPU's memory that PyTorch may allocate in a rank."""
    rank_gpus: float
    """GPUs that one rank declares to Ray, a fraction where it shares one; 0 on the CPU."""
    packing_strategy: Strategy = "bfd"
    """How supervised rows are packed."""
    engine_share: float | None = None
    """Fraction of the GPU's memory of an engine that uses it in its shifts. None: no engine
    does."""
    records_tokens: bool = False
    """Whether policy steps write `trained/*.parquet`."""
    batch_sizes: BatchSizes = SAME
    """Rows of each applied step, over which the learning rate falls. By default, all steps have as
    many."""

    @property
    def length_setting(self) -> str:
        """The setting that makes trajectories shorter, for messages."""
        online = isinstance(self.objective, OnlineObjective)
        return "rollout.max_completion_length" if online else "data.max_length"

    @property
    def temperature(self) -> float:
        """Temperature of log-probs. Rows of a dataset count as sampled at 1."""
        objective = self.objective
        return objective.rollout.temperature if isinstance(objective, OnlineObjective) else 1.0

    @property
    def stops(self) -> tuple[list[str], list[int]]:
        """Additional strings and token ids that end a completion."""
        if not isinstance(self.objective, OnlineObjective):
            return [], []
        rollout = self.objective.rollout
        return rollout.rollout_stop, rollout.rollout_stop_token_ids

    @property
    def online(self) -> OnlineObjective:
        """What a run with generators trains.

        Raises:
            ValueError: the run trains on a dataset.
        """
        if not isinstance(self.objective, OnlineObjective):
            raise ValueError(f"this run trains on a dataset (objective: {self.objective.name})")
        return self.objective

    @property
    def policy(self) -> PolicyGradient:
        """What policy steps train.

        Raises:
            ValueError: the run trains pairs, or on a dataset.
        """
        algorithm = self.online.algorithm
        if not isinstance(algorithm, PolicyGradient):
            raise ValueError("this run trains pairs; leave algorithm.preference out")
        return algorithm
