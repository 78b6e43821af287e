"""KL-Cov: a penalty on the tokens of highest covariance (arXiv:2505.22617)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from asyncrl.algorithms.losses.clip_cov import SelectsTokens
from asyncrl.algorithms.losses.token_loss import RatioLoss, Terms, unclipped
from asyncrl.algorithms.policy_tokens import PolicyTokens

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class KlCov(SelectsTokens, RatioLoss):
    """Ratio without a clip, with a penalty on the tokens of highest covariance."""

    name: Literal["kl_cov"] = "kl_cov"
    kl_cov_coef: float = Field(default=1.0, gt=0)
    """Weight of abs(log ratio) in the loss of the selected tokens. It has no gradient where the
    ratio is 1."""

    def terms(self, tokens: PolicyTokens, log_ratio: Tensor) -> Terms:
        """-r·A, plus kl_cov_coef · |log r| at the selected tokens (section 4.2).

        The authors' code estimates the KL divergence from the old policy by |log r|. Its gradient
        is ±kl_cov_coef, and 0 at r = 1.
        """
        loss = -log_ratio.exp() * tokens.advantages
        if tokens.selected is not None:
            loss = loss + (self.kl_cov_coef * log_ratio.abs()).masked_fill(~tokens.selected, 0.0)
        return unclipped(loss)

    def select(
        self, covariances: np.ndarray, stopped: np.ndarray, seed: Sequence[int]
    ) -> np.ndarray:
        from asyncrl.algorithms.covariance import largest  # it imports numpy

        return largest(covariances, self.cov_share)
