"""VESPO: a soft weight for each trajectory (arXiv:2602.10693)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from asyncrl.algorithms.kl import LOG_RATIO_LIMIT
from asyncrl.algorithms.losses.token_loss import Terms, TokenLoss, unclipped
from asyncrl.algorithms.policy_tokens import OldPolicy, PolicyTokens
from asyncrl.algorithms.sequences import sequence_sum

if TYPE_CHECKING:
    from torch import Tensor


class Vespo(TokenLoss):
    """Soft weight W^k · exp(λ·(1 - W)) of each trajectory, with W its product of ratios. The weight
    is largest at W = k / λ."""

    name: Literal["vespo"] = "vespo"
    old_policy: ClassVar[OldPolicy] = "behavior"
    compares_sequences: ClassVar[bool] = True
    needs_one_advantage: ClassVar[bool] = True

    k_positive: float = Field(default=2.0, ge=0)
    """k for advantages of at least 0."""
    lambda_positive: float = Field(default=3.0, gt=0)
    """λ for advantages of at least 0. A higher value weights large W less."""
    k_negative: float = Field(default=3.0, ge=0)
    """k for negative advantages. A higher value weights small W less."""
    lambda_negative: float = Field(default=2.0, gt=0)
    """λ for negative advantages."""

    def terms(self, tokens: PolicyTokens, log_ratio: Tensor) -> Terms:
        """-sg(φ(W))·A·log π, with φ(W) = W^k · exp(λ·(1 - W)).

        φ is 1 on policy, and falls to 0 on both sides of its maximum, so no token is clipped.
        """
        sequence, good = tokens.sequence, tokens.advantages >= 0
        total = sequence_sum(log_ratio.detach(), sequence, tokens.sequences)[sequence]
        log_w = total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        power = log_w.new_full(log_w.shape, self.k_negative).masked_fill(good, self.k_positive)
        decay = log_w.new_full(log_w.shape, self.lambda_negative)
        decay = decay.masked_fill(good, self.lambda_positive)
        weight = (power * log_w + decay * (1 - log_w.exp())).exp()
        return unclipped(-weight * tokens.advantages * tokens.logprobs)
