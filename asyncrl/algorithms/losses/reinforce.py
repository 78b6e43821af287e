"""REINFORCE (Williams 1992)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from asyncrl.algorithms.losses.token_loss import Terms, TokenLoss, unclipped
from asyncrl.algorithms.policy_tokens import OldPolicy, PolicyTokens

if TYPE_CHECKING:
    from torch import Tensor


class Reinforce(TokenLoss):
    """No ratio. Stale tokens need a truncated weight (correction.truncation)."""

    name: Literal["reinforce"] = "reinforce"
    old_policy: ClassVar[OldPolicy] = "learner"

    def terms(self, tokens: PolicyTokens, log_ratio: Tensor) -> Terms:
        """-A·log π."""
        return unclipped(-tokens.advantages * tokens.logprobs)
