"""The settings of a run that the learner's ranks get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.algorithms.advantages.gae import Gae
from asyncrl.algorithms.schedules import SAME, BatchSizes
from asyncrl.config import (
    AlgorithmConfig,
    DpoConfig,
    LearnerConfig,
    LoraConfig,
    PolicyGradient,
    RewardModelConfig,
)
from asyncrl.config.algorithm import OnlinePreferenceConfig
from asyncrl.packing.packing import Strategy


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """The settings of one run that its learner needs."""

    learner: LearnerConfig
    algorithm: AlgorithmConfig
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
    """How supervised rows are packed."""
    placement_wait_s: float
    """Seconds that the ranks may wait for resources."""
    run_directory: Path
    length_setting: str = "rollout.max_completion_length"
    """The setting that makes trajectories shorter, for messages."""
    dpo: DpoConfig | None = None
    """Preference steps on a dataset; None = the run takes none."""
    reward_model: RewardModelConfig | None = None
    """A reward model, whose policy gets a score head; None = the run trains none."""
    rollout_stop: tuple[str, ...] = ()
    rollout_stop_token_ids: tuple[int, ...] = ()
    """What ends the generators' completions besides the model's own stops. Exports name them."""
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Variables of the chat template, whose end of turn exports name too."""
    batch_sizes: BatchSizes = SAME
    """Rows of each applied step, over which the learning rate falls. By default, all steps have as
    many."""
    lora: LoraConfig | None = None
    """The adapter that is trained; None = all weights are."""
    max_staleness: int = 0
    """Largest staleness of a pair (online DPO) and, with `masks_stale`, of a token, in versions."""
    masks_stale: bool = False
    """Whether tokens beyond `max_staleness` are masked. Otherwise no scored group has any."""
    gpus: float = 0.0
    """GPUs that one rank declares to Ray, a fraction where it shares one; 0 on the CPU."""
    engine_memory: float | None = None
    """generator.gpu_memory_utilization of the engines that use the ranks' GPUs in their turns;
    None: none do."""

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
