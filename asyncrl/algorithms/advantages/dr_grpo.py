"""Dr. GRPO (arXiv:2503.20783)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from asyncrl.algorithms.advantages.group_advantage import ComparesTurns, GroupInputs

if TYPE_CHECKING:
    import numpy as np


class DrGrpo(ComparesTurns):
    """r - mean of the group."""

    name: Literal["dr_grpo"] = "dr_grpo"

    def of_group(self, rewards: np.ndarray, inputs: GroupInputs) -> np.ndarray:
        """r - mean (section 3.2)."""
        found: np.ndarray = rewards - rewards.mean()
        return found
