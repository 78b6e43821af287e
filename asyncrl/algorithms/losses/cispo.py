"""CISPO: a clipped weight (MiniMax-M1, arXiv:2506.13585)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from asyncrl.algorithms.losses.token_loss import ClippedLoss, RatioLoss, Terms
from asyncrl.algorithms.policy_tokens import PolicyTokens

if TYPE_CHECKING:
    from torch import Tensor


class Cispo(ClippedLoss, RatioLoss):
    """Clipped weight of each token, which keeps its gradient."""

    name: Literal["cispo"] = "cispo"
    eps_clip: float = Field(default=1.0, gt=0, le=1)
    """Lower clip of the weight: 1 - eps_clip. 1 = none, as in the paper. A lower bound would raise
    the weight of tokens that the learner now rarely samples."""

    def terms(self, tokens: PolicyTokens, log_ratio: Tensor) -> Terms:
        """-sg(clip(r, 1 - eps_clip, 1 + eps_clip_high))·A·log π, and the tokens whose weight is
        clipped (eq. 4-5). Every token keeps a gradient."""
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(1 - self.eps_clip, 1 + self.eps_clip_high)
        return Terms(-weight * tokens.advantages * tokens.logprobs, weight != ratio)
