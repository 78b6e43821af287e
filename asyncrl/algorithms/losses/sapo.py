"""SAPO: a soft gate (arXiv:2511.20347)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from asyncrl.algorithms.losses.token_loss import RatioLoss, Terms, unclipped
from asyncrl.algorithms.policy_tokens import PolicyTokens

if TYPE_CHECKING:
    from torch import Tensor


class Sapo(RatioLoss):
    """Soft gate of each token's ratio, instead of a clip."""

    name: Literal["sapo"] = "sapo"
    tau_positive: float = Field(default=1.0, gt=0)
    """Temperature for positive advantages."""
    tau_negative: float = Field(default=1.05, gt=0)
    """Temperature for negative advantages."""

    def terms(self, tokens: PolicyTokens, log_ratio: Tensor) -> Terms:
        """-σ(τ·(r - 1))·(4/τ)·A, with τ by the sign of A (eq. 5-6). At r = 1 its gradient is the
        policy gradient."""
        advantages = tokens.advantages
        tau = advantages.new_full(advantages.shape, self.tau_negative)
        tau = tau.masked_fill(advantages > 0, self.tau_positive)
        return unclipped(-(tau * (log_ratio.exp() - 1)).sigmoid() * 4 / tau * advantages)
