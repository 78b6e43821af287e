"""ReMax: the greedy completion as baseline (arXiv:2310.10505)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from asyncrl.algorithms.advantages.group_advantage import GroupAdvantage, GroupInputs

if TYPE_CHECKING:
    import numpy as np


class ReMax(GroupAdvantage):
    """r - r of the prompt's greedy completion, which the generators make for each group and the
    learner never trains."""

    name: Literal["remax"] = "remax"
    compares_siblings: ClassVar[bool] = False
    needs_baseline: ClassVar[bool] = True
    no_kl_in_reward: ClassVar[str] = (
        "The baseline has no log-probs of the reference policy to lower its own reward; use"
        " kl_loss_coef"
    )

    def of_group(self, rewards: np.ndarray, inputs: GroupInputs) -> np.ndarray:
        """r - r of the greedy completion of the same prompt, by the same policy (algorithm 2). The
        baseline does not depend on what was sampled, so a group may have a single trajectory."""
        if inputs.baseline is None or not math.isfinite(inputs.baseline):
            raise ValueError(
                f"algorithm.advantage: remax got the baseline {inputs.baseline}; give the reward of"
                " the greedy completion, a finite number"
            )
        found: np.ndarray = rewards - inputs.baseline
        return found
