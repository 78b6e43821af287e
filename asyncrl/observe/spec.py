"""What observation needs to know of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config import (
    EnvironmentConfig,
    EvalConfig,
    EvalSet,
    ObserveConfig,
    RewardConfig,
    RolloutConfig,
    StalenessConfig,
)


@dataclass(frozen=True, slots=True)
class ObserveSpec:
    """The settings of one run that the live table, the alarms and the summary need."""

    max_steps: int
    staleness: StalenessConfig
    rollout: RolloutConfig
    environment: EnvironmentConfig | None
    reward: RewardConfig
    eval: EvalConfig
    observe: ObserveConfig
    accuracy: str
    """The reward function that evaluations report."""
    evaluation_sets: Mapping[str, EvalSet]
    """In the order of evaluation."""

    @property
    def train_ends(self) -> Sequence[str]:
        """Ends of sessions that are trained. Empty without an environment."""
        return self.environment.train_ends if self.environment else ()

    @property
    def is_accuracy(self) -> bool:
        """Whether the mean of `accuracy` is called so, because `eval.accuracy` names it. Other
        rewards may have any scale."""
        return self.eval.accuracy is not None
