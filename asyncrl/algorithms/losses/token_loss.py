"""What every loss of tokens has. This module imports no torch, and its arithmetic needs none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from pydantic import Field

from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.sequences import none_of
from asyncrl.contracts.section import Section

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class Terms(NamedTuple):
    """The loss of N tokens."""

    loss: Tensor
    """[N], in nats."""
    stopped: Tensor
    """[N] bool: where the loss's own clip stops the gradient."""
    metrics: Mapping[str, Tensor] = MappingProxyType({})
    """Sums over the tokens, by name (losses of the user)."""


class TokenLoss(Section):
    """A loss with one value for each token."""

    needs_one_advantage: ClassVar[bool] = False
    """Whether the loss is defined for one advantage per trajectory only."""
    compares_sequences: ClassVar[bool] = False
    """Whether the loss of a token may depend on the other tokens of its trajectory."""
    selects_tokens: ClassVar[bool] = False
    """Whether the loss treats tokens of high covariance differently. Then it has `select`."""

    @property
    def clips(self) -> bool:
        """Whether the loss clips a ratio that is not always 1."""
        return False

    def terms(self, tokens: PolicyTokens, log_ratio: Tensor) -> Terms:
        """Return the loss of each token.

        Args:
            log_ratio: [N], log π_learner - log π_old, with the gradient of `tokens.logprobs`.
        """
        raise NotImplementedError

    def select(
        self, covariances: np.ndarray, stopped: np.ndarray, seed: Sequence[int]
    ) -> np.ndarray:
        """Return [N] bool: the tokens of the whole step that it treats differently.

        Args:
            covariances: [N], see `algorithms.covariance`.
            stopped: [N] bool, see `Terms`.
            seed: of a draw. Every rank gives the same.
        """
        raise NotImplementedError


class RatioLoss(TokenLoss):
    """A loss of the ratio π_learner / π_old."""

    old_policy: Literal["behavior", "log_linear"] = "behavior"
    """Denominator of the loss's ratio. `behavior`: the policy that sampled. `log_linear`: an
    estimate of the policy one version before (A-3PO); correction.truncation corrects from the
    behavior policy to it."""


class ClippedLoss(TokenLoss):
    """A loss that bounds the ratio π_learner / π_old."""

    eps_clip: float = Field(default=0.2, gt=0, le=1)
    """Lower clip of the ratio: 1 - eps_clip."""
    eps_clip_high: float = Field(default=0.28, gt=0)
    """Upper clip of the ratio: 1 + eps_clip_high."""

    @property
    def clips(self) -> bool:
        return True


def unclipped(loss: Tensor) -> Terms:
    """The terms of a loss that stops no token's gradient."""
    return Terms(loss, none_of(loss))
