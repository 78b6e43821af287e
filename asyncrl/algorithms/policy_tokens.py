"""The loss tokens of a micro-batch. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from asyncrl.algorithms.kl import LOG_RATIO_LIMIT

if TYPE_CHECKING:
    from torch import Tensor

OldPolicy: TypeAlias = Literal["behavior", "learner", "log_linear"]


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """The N loss tokens of `sequences` trajectories, as the learner now evaluates them. Log-probs
    are in nats."""

    logprobs: Tensor
    """[N], with gradient."""
    behavior_logprobs: Tensor
    """[N], from the engine that sampled."""
    advantages: Tensor
    """[N]."""
    weights: Tensor
    """[N], of the step's loss: see `token_weights`."""
    sequence: Tensor
    """[N] int64: the trajectory of each token."""
    sequences: int
    ages: Tensor
    """[N] float: learner's version minus the version that sampled the token."""
    reference_logprobs: Tensor | None = None
    """[N], of the frozen reference policy."""
    values: Tensor | None = None
    """[N], of the value head, with gradient."""
    returns: Tensor | None = None
    """[N], the targets of the values."""
    selected: Tensor | None = None
    """[N] bool: the tokens that clip_cov and kl_cov treat differently. None = no token."""

    def old_logprobs(self, policy: OldPolicy) -> Tensor:
        """Return the log-probs [N] of the policy that a loss compares the learner with: the one
        that sampled, the learner before this step (which is the current one, because each batch
        gets one step), or `log_linear`.

        `log_linear` estimates the policy one version before the learner's (A-3PO, arXiv:2512.06547,
        section 3). It interpolates from the behavior policy μ, `ages` versions before:
        log μ + (age - 1)/age · (log π - log μ). At age 0 it is log π.
        """
        if policy == "behavior":
            return self.behavior_logprobs
        now = self.logprobs.detach()
        if policy == "learner":
            return now
        share = ((self.ages - 1) / self.ages.clamp(min=1)).masked_fill(self.ages <= 0, 1.0)
        return self.behavior_logprobs + share * (now - self.behavior_logprobs)

    def log_ratio(self, policy: OldPolicy) -> Tensor:
        """Return log π_learner - log π_old [N] with gradient, within ± LOG_RATIO_LIMIT."""
        log_ratio = self.logprobs - self.old_logprobs(policy)
        return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
