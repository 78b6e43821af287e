"""GDPO: each reward function normalized by itself (arXiv:2601.05242)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from asyncrl.algorithms.advantages.group_advantage import (
    STD_FLOOR,
    GroupInputs,
    StepAdvantage,
    StepInputs,
)
from asyncrl.algorithms.advantages.over_step import normalized

if TYPE_CHECKING:
    import numpy as np


class Gdpo(StepAdvantage):
    """`grpo` of each reward function, then their weighted sum, normalized over the step's
    trajectories."""

    name: Literal["gdpo"] = "gdpo"
    learns_from_equal: ClassVar[bool] = True
    no_penalties: ClassVar[str] = "normalizes the rewards of each function"

    def of_group(self, rewards: np.ndarray, inputs: GroupInputs) -> np.ndarray:
        """Σ weight · (part - mean) / (std + 1e-6), over the reward functions, each with its own
        mean and std (section 3)."""
        import numpy as np

        total = np.zeros(len(rewards))
        for weight, values in inputs.parts:
            if weight:  # a function without weight may leave trajectories unscored
                part = np.array(values, dtype=np.float64)
                total += weight * (part - part.mean()) / (part.std() + STD_FLOOR)
        return total

    def of_step(self, advantages: Sequence[float], step: StepInputs) -> Sequence[float]:
        """(A - mean) / (std + 1e-6), where each trajectory counts once."""
        return normalized(advantages, [1 / rows for rows in step.rows])
