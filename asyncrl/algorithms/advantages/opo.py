"""OPO: the optimal baseline by length (arXiv:2505.23585)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from asyncrl.algorithms.advantages.group_advantage import GroupAdvantage, GroupInputs

if TYPE_CHECKING:
    import numpy as np


class Opo(GroupAdvantage):
    """r - mean of the group, weighted by length."""

    name: Literal["opo"] = "opo"

    def of_group(self, rewards: np.ndarray, inputs: GroupInputs) -> np.ndarray:
        """r - Σ l·r / Σ l, with l the loss tokens of each trajectory: the optimal baseline where
        the squared gradient of a trajectory grows with its length."""
        import numpy as np

        lengths = inputs.lengths
        if len(lengths) != len(rewards) or not all(length > 0 for length in lengths):
            raise ValueError(
                f"algorithm.advantage: opo got the lengths {list(lengths)} of {len(rewards)} usable"
                " trajectories; give the loss tokens of each, at least 1"
            )
        found: np.ndarray = rewards - np.average(rewards, weights=lengths)
        return found
