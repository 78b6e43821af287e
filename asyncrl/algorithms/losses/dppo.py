"""DPPO with the binary total variation (arXiv:2602.04879)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from asyncrl.algorithms.losses.token_loss import Terms, TokenLoss
from asyncrl.algorithms.policy_tokens import OldPolicy, PolicyTokens

if TYPE_CHECKING:
    from torch import Tensor


class Dppo(TokenLoss):
    """Mask by the difference of probabilities."""

    name: Literal["dppo"] = "dppo"
    old_policy: ClassVar[OldPolicy] = "behavior"
    threshold: float = Field(default=0.15, gt=0, lt=1)
    """Largest change of a token's probability."""

    def terms(self, tokens: PolicyTokens, log_ratio: Tensor) -> Terms:
        """-r·A, without a gradient where the token's probability has moved too far (section 4).

        Too far means more than the threshold away from the behavior policy's probability, in the
        direction in which A pushes it.
        """
        advantages = tokens.advantages
        moved = tokens.logprobs.detach().exp() - tokens.behavior_logprobs.exp()
        stopped = ((advantages > 0) & (moved > self.threshold)) | (
            (advantages < 0) & (moved < -self.threshold)
        )
        return Terms((-log_ratio.exp() * advantages).masked_fill(stopped, 0.0), stopped)
