"""A loss of the user."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from asyncrl.algorithms.losses.token_loss import Terms, TokenLoss, unclipped
from asyncrl.algorithms.policy_tokens import OldPolicy, PolicyTokens
from asyncrl.runtime.functions import FUNCTION

if TYPE_CHECKING:
    from torch import Tensor


class OwnLoss(TokenLoss):
    """Your own function (docs/how_to/own_algorithm.md)."""

    name: str = Field(pattern=FUNCTION)
    """`package.module:function`, importable in a new process."""
    arguments: dict[str, Any] = Field(default={})
    """Keyword arguments of the function, in addition to its tensors."""
    old_policy: OldPolicy = "behavior"
    """Which policy's log-probs the function gets as `old_logprobs`; see `ppo`."""
    compares_sequences: ClassVar[bool] = True

    def terms(self, tokens: PolicyTokens, log_ratio: Tensor) -> Terms:
        """What the function returns. Raises FunctionError if it fails or breaks its contract."""
        from asyncrl.algorithms.user_functions import own_loss  # it imports numpy

        if not tokens.logprobs.numel():  # it need not handle a stand-in micro-batch
            return unclipped(tokens.logprobs)
        given: dict[str, Tensor | int] = {
            "logprobs": tokens.logprobs,
            "old_logprobs": tokens.old_logprobs(self.old_policy),
            "behavior_logprobs": tokens.behavior_logprobs,
            "advantages": tokens.advantages,
            "ages": tokens.ages,
            "sequence": tokens.sequence,
            "sequences": tokens.sequences,
        }
        return Terms(*own_loss(self.name, given, self.arguments))
