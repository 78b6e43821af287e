"""REINFORCE++, with and without a baseline (arXiv:2501.03262)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from asyncrl.algorithms.advantages.group_advantage import (
    NEEDS_KL_OF_TOKENS,
    GroupInputs,
    StepAdvantage,
    StepInputs,
)
from asyncrl.algorithms.advantages.over_step import normalized

if TYPE_CHECKING:
    import numpy as np


class ReinforcePlusPlus(StepAdvantage):
    """r, normalized over the step."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    compares_siblings: ClassVar[bool] = False
    learns_from_equal: ClassVar[bool] = True
    no_kl_in_reward: ClassVar[str] = NEEDS_KL_OF_TOKENS

    def of_group(self, rewards: np.ndarray, inputs: GroupInputs) -> np.ndarray:
        """r."""
        return rewards

    def of_step(self, advantages: Sequence[float], step: StepInputs) -> Sequence[float]:
        """(A - mean) / (std + 1e-6), where each row counts once per loss token (section 3)."""
        return normalized(advantages, step.tokens)


class ReinforcePlusPlusBaseline(StepAdvantage):
    """r - mean of the group, normalized over the step."""

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"

    def of_group(self, rewards: np.ndarray, inputs: GroupInputs) -> np.ndarray:
        """r - mean."""
        found: np.ndarray = rewards - rewards.mean()
        return found

    def of_step(self, advantages: Sequence[float], step: StepInputs) -> Sequence[float]:
        """As `reinforce_plus_plus`."""
        return normalized(advantages, step.tokens)
