"""RLOO: the others as baseline (arXiv:2402.14740)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from asyncrl.algorithms.advantages.group_advantage import ComparesTurns, GroupInputs

if TYPE_CHECKING:
    import numpy as np


class Rloo(ComparesTurns):
    """r - mean of the group's other trajectories."""

    name: Literal["rloo"] = "rloo"

    def of_group(self, rewards: np.ndarray, inputs: GroupInputs) -> np.ndarray:
        """n / (n - 1) · (r - mean) = r - mean of the others (section 3.2)."""
        n = len(rewards)
        found: np.ndarray = (rewards - rewards.mean()) * (n / max(n - 1, 1))
        return found
