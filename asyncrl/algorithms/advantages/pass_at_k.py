"""Advantages of pass@k (arXiv:2508.10751)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from asyncrl.algorithms.advantages.group_advantage import STD_FLOOR, GroupAdvantage, GroupInputs
from asyncrl.algorithms.pass_at_k import pass_at_k

if TYPE_CHECKING:
    import numpy as np


class PassAtK(GroupAdvantage):
    """`grpo` of subsets of pass_k trajectories. A subset passes if one of them does."""

    name: Literal["pass_at_k"] = "pass_at_k"
    no_penalties: ClassVar[str] = "compares the reward with pass_threshold"

    pass_k: int = Field(default=4, gt=0)
    """Trajectories of a subset. Must be below rollout.n_samples_per_prompt."""
    pass_threshold: float = 1.0
    """A trajectory passes if its reward is at least this value."""

    def of_group(self, rewards: np.ndarray, inputs: GroupInputs) -> np.ndarray:
        """GRPO's advantages of random subsets of k trajectories, whose reward is 1 if one of them
        passes, averaged over the subsets of each trajectory (eq. 14-15).

        A subset has the advantage (1 - R) / σ if one of it passes and -R / σ if none does. R is
        pass@k and σ = sqrt(R · (1 - R)). A trajectory that passes is only in subsets of the first
        kind. For another one, the other k - 1 members decide.
        """
        import numpy as np

        passed = rewards >= self.pass_threshold
        n, passing = len(passed), int(passed.sum())
        k = min(self.pass_k, n)
        rate = pass_at_k(n, passing, k)
        # Without this trajectory, n - 1 remain, and the same number of them passes.
        others = pass_at_k(n - 1, passing, k - 1) if k > 1 and passing < n else 0.0
        return np.where(passed, 1 - rate, others - rate) / (
            math.sqrt(rate * (1 - rate)) + STD_FLOOR
        )
