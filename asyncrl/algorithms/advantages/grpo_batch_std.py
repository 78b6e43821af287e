"""GRPO with the std of the whole step (Lite PPO, arXiv:2508.08221)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from asyncrl.algorithms.advantages.group_advantage import (
    DIVIDES_BY_STD,
    GroupInputs,
    StepAdvantage,
    StepInputs,
)
from asyncrl.algorithms.advantages.over_step import over_std

if TYPE_CHECKING:
    import numpy as np


class GrpoBatchStd(StepAdvantage):
    """(r - mean) / std of the step's rewards (Lite PPO)."""

    name: Literal["grpo_batch_std"] = "grpo_batch_std"
    no_kl_in_reward: ClassVar[str] = DIVIDES_BY_STD

    def of_group(self, rewards: np.ndarray, inputs: GroupInputs) -> np.ndarray:
        """r - mean of the group."""
        found: np.ndarray = rewards - rewards.mean()
        return found

    def of_step(self, advantages: Sequence[float], step: StepInputs) -> Sequence[float]:
        """A / (std + 1e-6), with the population std of all rewards of the step."""
        return over_std(advantages, step.rewards)
