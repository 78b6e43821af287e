"""GMPO: the geometric mean of clipped ratios (arXiv:2507.20673)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from asyncrl.algorithms.losses.gspo import of_sequence
from asyncrl.algorithms.losses.token_loss import ClippedLoss, RatioLoss, Terms
from asyncrl.algorithms.policy_tokens import PolicyTokens

if TYPE_CHECKING:
    from torch import Tensor


class Gmpo(ClippedLoss, RatioLoss):
    """Geometric mean of a trajectory's clipped ratios. It clips before the mean, and the paper uses
    0.33 below and 0.49 above."""

    name: Literal["gmpo"] = "gmpo"
    compares_sequences: ClassVar[bool] = True
    needs_one_advantage: ClassVar[bool] = True

    def terms(self, tokens: PolicyTokens, log_ratio: Tensor) -> Terms:
        """-A times the geometric mean of a trajectory's clipped ratios, at each of its tokens with
        the token's own gradient (section 3).

        A token's ratio is bounded by 1 + eps_clip_high where A > 0, and by 1 - eps_clip where
        A < 0. The paper bounds log-ratios by ±0.4. It averages over trajectories
        (`loss_aggregation: sequence_mean_token_mean`).
        """
        advantages = tokens.advantages
        low = math.log(1 - self.eps_clip) if self.eps_clip < 1 else -math.inf
        high = math.log1p(self.eps_clip_high)
        bounded = log_ratio.clamp(min=low).where(advantages < 0, log_ratio.clamp(max=high))
        stopped = ((advantages > 0) & (log_ratio > high)) | ((advantages < 0) & (log_ratio < low))
        # The same arithmetic as GSPO's, after the clip instead of before it.
        return Terms(-of_sequence(bounded, tokens).exp() * advantages, stopped)
