"""GSPO: one ratio for a trajectory (arXiv:2507.18071)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from asyncrl.algorithms.losses.ppo import clipped
from asyncrl.algorithms.losses.token_loss import ClippedLoss, RatioLoss, Terms
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.sequences import sequence_mean

if TYPE_CHECKING:
    from torch import Tensor


class Gspo(ClippedLoss, RatioLoss):
    """Clipped ratio of each trajectory. The ratio is a mean over the trajectory, and the paper
    clips it at 3e-4 below and 4e-4 above for long completions."""

    name: Literal["gspo"] = "gspo"
    compares_sequences: ClassVar[bool] = True

    def terms(self, tokens: PolicyTokens, log_ratio: Tensor) -> Terms:
        """PPO's clipped loss of each trajectory's mean log-ratio (GSPO-token, eq. 13-14).

        A whole trajectory is then inside or outside. The paper averages over trajectories of token
        means (`loss_aggregation: sequence_mean_token_mean`). Its clips suit long answers that are
        nearly on policy. Stale tokens of short answers need PPO's clips.
        """
        return clipped(of_sequence(log_ratio, tokens), tokens.advantages, self)


def of_sequence(log_ratio: Tensor, tokens: PolicyTokens) -> Tensor:
    """Each trajectory's mean log-ratio at each of its tokens, with the token's own gradient."""
    sequence = tokens.sequence
    mean = sequence_mean(log_ratio.detach(), sequence, tokens.sequences)[sequence]
    return mean + log_ratio - log_ratio.detach()
