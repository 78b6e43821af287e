"""Metrics of one micro-batch's loss: sums over its loss tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.algorithms.kl import LOG_RATIO_LIMIT, kl_estimate
from asyncrl.algorithms.sequences import sequence_max


class TokenTerms(NamedTuple):
    """What the policy objective computed at the N loss tokens of one micro-batch, detached."""

    logprobs: Tensor
    """[N], by the learner, in nats."""
    weights: Tensor
    """[N], importance weights, truncated and normalized."""
    clipped: Tensor
    """[N] bool: see `LossSums.clipped`."""
    masked: Tensor
    """[N] bool: see `LossSums.masked`."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over the N loss tokens of one micro-batch, as detached scalars. Divide by the number of
    tokens for means. `ratio_max` is a maximum.

    The ratio is π_learner / π_behavior for every loss. `loss` is already weighted: its sum over
    micro-batches and ranks is the loss of the step.
    """

    loss: Tensor
    ratio: Tensor
    ratio_squared: Tensor
    ratio_max: Tensor
    clipped: Tensor
    """Tokens whose gradient the loss's own clip stops, or whose weight it clips (CISPO)."""
    weight: Tensor
    """Truncated importance weights."""
    nonfinite: Tensor
    """Tokens whose log-prob is NaN or Inf in the learner or in the generator."""
    masked: Tensor | float = 0.0
    """Tokens that any correction masks. Several corrections may mask one token."""
    masked_band: Tensor | float = 0.0
    masked_rejected: Tensor | float = 0.0
    masked_sequence: Tensor | float = 0.0
    capped: Tensor | float = 0.0
    """Tokens whose importance weight the cap or the floor changed."""
    kl_k1: Tensor | float = 0.0
    kl_k3: Tensor | float = 0.0
    kl_reference: Tensor | float = 0.0
    """Estimates of KL(learner || reference)."""
    value_loss: Tensor | float = 0.0
    """The value head's part of the loss, already weighted."""
    drift: Tensor | float = 0.0
    """|log ratio| of the learner's own version's tokens in trajectories that an older version
    began. The old version's KV cache causes it."""
    drift_tokens: Tensor | float = 0.0
    own: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics of the user's loss."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics of the loss's components. Each is divided by its component's denominator over the
    whole step, so its sum over micro-batches and ranks is the metric."""
    tokens: TokenTerms | None = None
    """The terms that were summed; None without a policy objective."""


def ratio_sums(log_ratio: Tensor) -> dict[str, Tensor]:
    """Sums of ratio and KL estimates for log-ratios [N] of learner to behavior policy."""
    clamped = log_ratio.double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = clamped.exp()
    return {
        "ratio": ratio.sum(),
        "ratio_squared": ratio.square().sum(),
        "ratio_max": ratio.max() if ratio.numel() else ratio.new_zeros(()),
        "kl_k1": kl_estimate(clamped, "k1").sum(),
        "kl_k3": kl_estimate(clamped, "k3").sum(),
        "nonfinite": (~torch.isfinite(log_ratio)).sum(),
    }


def drift_sums(
    log_ratio: Tensor, ages: Tensor, sequence: Tensor, sequences: int
) -> dict[str, Tensor]:
    """|log ratio| and number of the tokens of age 0 in trajectories with an older token. All
    tensors have shape [N]."""
    clamped = log_ratio.double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    late = (ages == 0) & (sequence_max(ages, sequence, sequences)[sequence] > 0)
    return {"drift": clamped.abs()[late].sum(), "drift_tokens": late.sum()}


def supervised_sums(
    loss: Tensor, logprobs: Tensor, parts: Mapping[str, Tensor] | None = None
) -> LossSums:
    """The sums of a micro-batch of fixed rows with log-probs [N]: the ratios are those of an
    on-policy step."""
    zero, count = logprobs.new_zeros(()), logprobs.new_ones(()) * logprobs.numel()
    return LossSums(
        loss.detach(),
        ratio=count,
        ratio_squared=count,
        ratio_max=logprobs.new_ones(()),
        clipped=zero,
        weight=count,
        nonfinite=(~torch.isfinite(logprobs)).sum(),
        parts=parts or {},
    )
