"""Clip-Cov: PPO without some tokens of high covariance (arXiv:2505.22617)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from asyncrl.algorithms.losses.ppo import ClipsUnlessOnPolicy, clipped
from asyncrl.algorithms.losses.token_loss import Terms, TokenLoss
from asyncrl.algorithms.policy_tokens import PolicyTokens

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class SelectsTokens(TokenLoss):
    """A loss that treats some tokens of the step differently, by their covariance."""

    selects_tokens: ClassVar[bool] = True

    cov_share: float = Field(default=2e-4, gt=0, le=1)
    """Share of the step's tokens to select, at least one token. The covariance of a token is
    (log π - mean) · (A - mean), with means over the step. Costs an additional forward pass. The
    paper uses 2e-4, and 2e-3 for kl_cov with a 7B model."""


class ClipCov(SelectsTokens, ClipsUnlessOnPolicy):
    """`ppo` without some tokens of high covariance."""

    name: Literal["clip_cov"] = "clip_cov"
    clip_cov_low: float = 1.0
    """The tokens are drawn from those with a covariance above this, and their gradient stops."""
    clip_cov_high: float = 5.0
    """The tokens are drawn from those with a covariance below this."""

    @model_validator(mode="after")
    def bounds_leave_tokens(self) -> ClipCov:
        if self.clip_cov_low >= self.clip_cov_high:
            raise ValueError(
                f"clip_cov_low = {self.clip_cov_low:g} is not below clip_cov_high ="
                f" {self.clip_cov_high:g}, so no token can be selected; lower it"
            )
        return self

    def terms(self, tokens: PolicyTokens, log_ratio: Tensor) -> Terms:
        """PPO's clipped loss, but 0 at the selected tokens (section 4.2; PPO's clip is in the
        authors' code)."""
        found = clipped(log_ratio, tokens.advantages, self)
        if tokens.selected is None:
            return found
        return Terms(found.loss.masked_fill(tokens.selected, 0.0), found.stopped | tokens.selected)

    def select(
        self, covariances: np.ndarray, stopped: np.ndarray, seed: Sequence[int]
    ) -> np.ndarray:
        from asyncrl.algorithms.covariance import drawn_between  # it imports numpy

        bounds = self.clip_cov_low, self.clip_cov_high
        return drawn_between(covariances, stopped, self.cov_share, bounds, seed)
