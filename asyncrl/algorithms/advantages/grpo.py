"""GRPO (DeepSeekMath, arXiv:2402.03300)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from asyncrl.algorithms.advantages.group_advantage import (
    DIVIDES_BY_STD,
    STD_FLOOR,
    ComparesTurns,
    GroupInputs,
)

if TYPE_CHECKING:
    import numpy as np


class Grpo(ComparesTurns):
    """(r - mean) / std of the group, with the population std (verl and TRL use the sample std)."""

    name: Literal["grpo"] = "grpo"
    no_kl_in_reward: ClassVar[str] = DIVIDES_BY_STD

    def of_group(self, rewards: np.ndarray, inputs: GroupInputs) -> np.ndarray:
        """(r - mean) / (std + 1e-6), with the population std (eq. 3 and section 4.1.2). The sample
        std of verl and TRL gives sqrt((n - 1) / n) times these advantages."""
        found: np.ndarray = (rewards - rewards.mean()) / (rewards.std() + STD_FLOOR)
        return found
