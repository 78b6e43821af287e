"""Generalized advantage estimation with a value head (arXiv:1506.02438)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from asyncrl.algorithms.advantages.group_advantage import (
    NEEDS_KL_OF_TOKENS,
    GroupAdvantage,
    GroupInputs,
)

if TYPE_CHECKING:
    import numpy as np


class Gae(GroupAdvantage):
    """Per token, from a value head on the learner, normalized over the step."""

    name: Literal["gae"] = "gae"
    compares_siblings: ClassVar[bool] = False
    of_each_token: ClassVar[bool] = True
    learns_from_equal: ClassVar[bool] = True
    no_kl_in_reward: ClassVar[str] = NEEDS_KL_OF_TOKENS

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """0 looks one token ahead, 1 looks to the end of the completion."""
    value_coef: float = Field(default=0.5, gt=0)
    """Weight of the value head's squared error in the loss."""
    value_learning_rate: float | None = Field(default=None, ge=0)
    """Peak learning rate of the value head, with the schedule of learner.learning_rate. A new head
    usually needs 10 to 100 times the policy's rate. Default: learner.learning_rate."""
    bootstrap_truncated: bool = False
    """Where a completion was cut off, count the value of the state after its last token as the
    reward that would have followed. Needs one more token in learner.max_tokens_per_gpu than the
    longest trajectory."""

    def of_group(self, rewards: np.ndarray, inputs: GroupInputs) -> np.ndarray:
        """r. The learner computes token advantages from it (`algorithms.values.gae`)."""
        return rewards
