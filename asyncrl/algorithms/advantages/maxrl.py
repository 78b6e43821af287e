"""MaxRL (arXiv:2602.02710)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from asyncrl.algorithms.advantages.group_advantage import STD_FLOOR, GroupAdvantage, GroupInputs

if TYPE_CHECKING:
    import numpy as np


class MaxRl(GroupAdvantage):
    """(r - mean) / mean of the group, for rewards of at least 0."""

    name: Literal["maxrl"] = "maxrl"
    least_reward: ClassVar[float | None] = 0.0
    no_penalties: ClassVar[str] = "needs rewards of at least 0"

    def of_group(self, rewards: np.ndarray, inputs: GroupInputs) -> np.ndarray:
        """(r - mean) / (mean + 1e-6) (section 3)."""
        if (rewards < 0).any():
            raise ValueError(
                "algorithm.advantage: maxrl needs rewards of 0 and above, not"
                f" {rewards.tolist()}; use grpo or rloo"
            )
        found: np.ndarray = (rewards - rewards.mean()) / (rewards.mean() + STD_FLOOR)
        return found
