"""The settings of a run that the learner's ranks get."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl.algorithms.advantages.gae import Gae
from asyncrl.algorithms.schedules import SAME, BatchSizes
from asyncrl.config import (
    AlgorithmConfig,
    DataConfig,
    DpoConfig,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    OfflineDataConfig,
    PolicyGradient,
    RewardConfig,
    RewardModelConfig,
    RolloutConfig,
    StalenessConfig,
)
from asyncrl.config.algorithm import OnlinePreferenceConfig
from asyncrl.learning.packing.strategies import Strategy


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """The settings of one run that its learner needs."""

    learner: LearnerConfig
    model: ModelConfig
    lora: LoraConfig | None
    data: DataConfig | OfflineDataConfig
    rollout: RolloutConfig
    """How trajectories are sampled. Rows of a dataset count as sampled at temperature 1."""
    algorithm: AlgorithmConfig
    reward: RewardConfig
    staleness: StalenessConfig
    bucket_bytes: int
    """Size of a bucket of published weights."""
    longest_trajectory: int
    """Tokens of the longest possible trajectory."""
    learning_rate: float
    """Peak learning rate."""
    max_steps: int
    seed: int
    packing_strategy: Strategy
    """How supervised rows are packed."""
    placement_wait_s: float
    """Seconds that the ranks may wait for resources."""
    run_directory: Path
    rank_share: float
    """Largest fraction of a GPU's memory that PyTorch may allocate in a rank."""
    rank_gpus: float
    """GPUs that one rank declares to Ray, a fraction where it shares one; 0 on the CPU."""
    engine_share: float | None = None
    """Fraction of the GPU's memory of an engine that uses it in its shifts. None: no engine
    does."""
    dpo: DpoConfig | None = None
    """Preference steps on a dataset; None = the run takes none."""
    reward_model: RewardModelConfig | None = None
    """A reward model, whose policy gets a score head; None = the run trains none."""
    batch_sizes: BatchSizes = SAME
    """Rows of each applied step, over which the learning rate falls. By default, all steps have as
    many."""

    @property
    def length_setting(self) -> str:
        """The setting that makes trajectories shorter, for messages."""
        offline = isinstance(self.data, OfflineDataConfig)
        return "data.max_length" if offline else "rollout.max_completion_length"

    @property
    def preference(self) -> OnlinePreferenceConfig | DpoConfig | None:
        """What preference steps train; None = the run takes none."""
        return self.dpo or self.algorithm.preference

    @property
    def policy(self) -> PolicyGradient:
        """What policy steps train.

        Raises:
            ValueError: the run trains pairs.
        """
        if not isinstance(self.algorithm, PolicyGradient):
            raise ValueError("this run trains pairs; leave algorithm.preference out")
        return self.algorithm

    @property
    def has_reference(self) -> bool:
        """Whether a reference policy scores the run's rows, in a process of its own."""
        return self.algorithm.has_reference or (self.dpo is not None and self.dpo.has_reference)

    @property
    def has_value_head(self) -> bool:
        """Whether the policy has a head for values or scores."""
        values = isinstance(self.algorithm, PolicyGradient) and self.policy.advantage.of_each_token
        return values or self.reward_model is not None

    @property
    def value_learning_rate(self) -> float | None:
        """Peak learning rate of a value head or score head; None = that of the model."""
        own = None if self.reward_model is None else self.reward_model.value_learning_rate
        if isinstance(self.algorithm, PolicyGradient) and isinstance(self.algorithm.advantage, Gae):
            own = self.algorithm.advantage.value_learning_rate
        return own
