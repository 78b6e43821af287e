"""Corrections for training on tokens that another policy sampled, each with its settings: weights
and masks per token, without gradient. A masked token still counts in every denominator.

A log-ratio is log π_learner - log π_behavior (or a part of it), in nats, of shape [N] for the N
loss tokens. This module imports no torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from asyncrl.algorithms.kl import LOG_RATIO_LIMIT, kl_estimate
from asyncrl.algorithms.policy_tokens import OldPolicy, PolicyTokens
from asyncrl.algorithms.sequences import none_of, sequence_max, sequence_mean, sequence_sum
from asyncrl.contracts.section import Section, Short

if TYPE_CHECKING:
    from torch import Tensor

Level: TypeAlias = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]


class Truncation(Section):
    """Weight each token by min(π_old / π_behavior, cap). With a cap, this is truncated importance
    sampling (Ionides 2008; for LLMs: Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training")."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """`token`: the ratio of the token (TIS). `sequence`: the product over the trajectory.
    `geometric`: the geometric mean over the trajectory (GSPO's ratio, arXiv:2507.18071, eq. 7),
    which is biased and does not grow with the length."""
    cap: float = Field(default=2.0, ge=1)
    """Largest weight."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Smallest weight. It raises the weight of tokens that the learner now rarely samples. 0 =
    none."""
    normalize: bool = False
    """Divide the weights by their mean over the step's tokens. Costs an additional forward pass."""

    def weights(self, tokens: PolicyTokens, old_policy: OldPolicy) -> Tensor:
        """Return the weights [N] from the behavior policy to the old policy, before cap and
        floor."""
        log_weight = (tokens.old_logprobs(old_policy) - tokens.behavior_logprobs).detach()
        over = {"sequence": sequence_sum, "geometric": sequence_mean}.get(self.level)
        if over is not None:
            log_weight = over(log_weight, tokens.sequence, tokens.sequences)[tokens.sequence]
        return log_weight.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


class Band(Section):
    """Mask tokens whose π_learner / π_behavior is outside (IcePop, arXiv:2510.18855). IcePop also
    uses the ratio as the weight inside the band: for that, set loss.old_policy: learner and
    truncation: token, with a cap of at least `above`."""

    below: float | None = Field(default=None, gt=0, lt=1)
    """Mask tokens whose ratio is below this value. None = none."""
    above: float | None = Field(default=None, gt=1)
    """Mask tokens whose ratio is above this value. None = none."""

    @model_validator(mode="after")
    def has_an_edge(self) -> Band:
        if self.below is None and self.above is None:
            raise ValueError("give below, above or both")
        return self

    def masked(self, log_ratio: Tensor) -> Tensor:
        """Return [N] bool, True for the tokens outside."""
        ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        return ~((ratio >= (self.below or 0.0)) & (ratio <= (self.above or math.inf)))


class Rejection(Section):
    """Mask tokens or trajectories whose KL estimate is too high."""

    above: float = Field(gt=0)
    """Mask those whose absolute KL estimate is above this value, in nats."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """KL estimate: -l, l²/2 or e^l - 1 - l, with l = log π_learner / π_behavior."""
    level: Level = "token"
    """What is compared: a single token, or a trajectory by the sum, mean or maximum over its
    tokens. A rejected trajectory loses all of its tokens."""

    def masked(self, log_ratio: Tensor, tokens: PolicyTokens) -> Tensor:
        """Return [N] bool, True for the rejected tokens."""
        values = kl_estimate(log_ratio, self.estimator)
        sequence, sequences = tokens.sequence, tokens.sequences
        if self.level == "sequence_sum":
            values = sequence_sum(values, sequence, sequences)[sequence]
        elif self.level == "sequence_mean":
            values = sequence_mean(values, sequence, sequences)[sequence]
        elif self.level == "sequence_max":
            values = sequence_max(values.abs(), sequence, sequences)[sequence]
        return ~(values.abs() <= self.above)


class SequenceMask(Section):
    """Mask trajectories with a negative advantage that the learner would hardly sample any more
    (DeepSeek-V3.2, arXiv:2512.02556, section 3.1)."""

    above: float = Field(gt=0)
    """Mask those whose mean log π_behavior / π_learner is above this value, in nats."""

    def masked(self, log_ratio: Tensor, tokens: PolicyTokens) -> Tensor:
        """Return [N] bool, True for the tokens of these trajectories."""
        clamped = -log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        distance = sequence_mean(clamped, tokens.sequence, tokens.sequences)[tokens.sequence]
        return ~((tokens.advantages >= 0) | (distance <= self.above))


class Correction(Section):
    """Correction for tokens that another policy sampled, in addition to the loss's own ratio.
    Masked tokens still count in every denominator."""

    truncation: Annotated[Truncation, Short("level")] | None = None
    """Truncated importance weights: `token`, `sequence` or `geometric`, or a mapping with their
    settings. They correct from the behavior policy to the old policy of the loss, so they need an
    old_policy other than behavior. None = weight 1."""
    band: Band | None = None
    rejection: Rejection | None = None
    sequence_mask: SequenceMask | None = None

    @property
    def compares_sequences(self) -> bool:
        """Whether the weight of a token may depend on the other tokens of its trajectory."""
        weighs = self.truncation is not None and self.truncation.level != "token"
        rejects = self.rejection is not None and self.rejection.level != "token"
        return weighs or rejects or self.sequence_mask is not None

    @property
    def acts(self) -> bool:
        """Whether any token may be weighted or masked."""
        return self != Correction()

    def masks(self, tokens: PolicyTokens) -> dict[str, Tensor]:
        """Return the tokens [N] that each part masks, by its name in metrics."""
        log_ratio = (tokens.logprobs - tokens.behavior_logprobs).detach()
        none = none_of(log_ratio)
        masks = {"band": none, "rejected": none, "sequence": none}
        if self.band is not None:
            masks["band"] = self.band.masked(log_ratio)
        if self.rejection is not None:
            masks["rejected"] = self.rejection.masked(log_ratio, tokens)
        if self.sequence_mask is not None:
            masks["sequence"] = self.sequence_mask.masked(log_ratio, tokens)
        return masks
