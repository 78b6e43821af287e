"""Corrections for training on tokens that another policy sampled: weights and masks per token,
without gradient.

A log-ratio is log π_learner - log π_behavior (or a part of it), in nats. It has shape [N], for the
N loss tokens of some trajectories. `sequence` [N] is the index of each token's trajectory, below
`sequences`. A masked token still counts in every denominator.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl.algorithms.kl import LOG_RATIO_LIMIT, LOW_VAR_LIMIT, KLEstimator
from asyncrl.algorithms.objective_spec import Level

__all__ = [
    "LOG_RATIO_LIMIT",
    "band_mask",
    "importance_weights",
    "kl_estimate",
    "off_policy_sequence_mask",
    "rejection_mask",
    "sequence_max",
    "sequence_mean",
    "sequence_sum",
]


def sequence_sum(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """Return the sum over each trajectory's tokens: [N] → [sequences]."""
    return values.new_zeros(sequences).index_add(0, sequence, values)


def sequence_mean(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """Return the mean over each trajectory's loss tokens, 0 without tokens: [N] → [sequences]."""
    counts = sequence_sum(torch.ones_like(values), sequence, sequences)
    return sequence_sum(values, sequence, sequences) / counts.clamp(min=1)


def sequence_max(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """Return the maximum over each trajectory's tokens: [N] → [sequences]."""
    return values.new_full((sequences,), -torch.inf).scatter_reduce(0, sequence, values, "amax")


def importance_weights(
    log_weight: Tensor,
    sequence: Tensor,
    sequences: int,
    level: Literal["token", "sequence", "geometric"],
) -> Tensor:
    """Return importance weights [N]: exp(log_weight) for each token, or for each token the product
    (`sequence`) or the geometric mean (`geometric`) over its trajectory.

    With a cap, this is truncated importance sampling (Ionides 2008; for LLMs: Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training"). The geometric mean is
    GSPO's ratio (arXiv:2507.18071, eq. 7). It is biased, and does not grow with the length.
    """
    if level == "sequence":
        log_weight = sequence_sum(log_weight, sequence, sequences)[sequence]
    elif level == "geometric":
        log_weight = sequence_mean(log_weight, sequence, sequences)[sequence]
    return log_weight.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def band_mask(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """Return [N] bool, True where low ≤ exp(log_ratio) ≤ high: two-sided masking of single tokens
    (IcePop, arXiv:2510.18855).

    IcePop also uses the ratio as the weight inside the band. For that, set algorithm.old_policy:
    learner, correction.truncation: token, and a cap of at least mask_above.
    """
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return (ratio >= low) & (ratio <= high)


def kl_estimate(log_ratio: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(p || q) at each token sampled from p, with l = log_ratio = log q - log p.

    k1 = -l, k2 = l²/2, k3 = exp(l) - 1 - l, and low_var is k3 capped at 10
    (http://joschu.net/blog/kl-approx.html)."""
    clamped = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return -clamped
    if estimator == "k2":
        return clamped.square() / 2
    # expm1, because exp(l) - 1 has a rounding error of 1e-7 in float32: all of k3 at l = 5e-4.
    k3 = clamped.expm1() - clamped
    return k3.clamp(max=LOW_VAR_LIMIT) if estimator == "low_var" else k3


def rejection_mask(
    log_ratio: Tensor,
    sequence: Tensor,
    sequences: int,
    estimator: Literal["k1", "k2", "k3"],
    level: Level,
    above: float,
) -> Tensor:
    """Return [N] bool, False where the absolute KL estimate is above the threshold. (k1 is signed.)

    At level `token` each token is compared. At the other levels, the trajectory's sum, mean or
    maximum is compared, and a rejected trajectory loses all of its tokens."""
    values = kl_estimate(log_ratio, estimator)
    if level == "sequence_sum":
        values = sequence_sum(values, sequence, sequences)[sequence]
    elif level == "sequence_mean":
        values = sequence_mean(values, sequence, sequences)[sequence]
    elif level == "sequence_max":
        values = sequence_max(values.abs(), sequence, sequences)[sequence]
    return values.abs() <= above


def off_policy_sequence_mask(
    log_ratio: Tensor, advantages: Tensor, sequence: Tensor, sequences: int, above: float
) -> Tensor:
    """Return [N] bool, False for the tokens of a trajectory with a negative advantage and a mean of
    -log_ratio above the threshold.

    The learner would hardly sample such an answer any more, so it learns nothing from it
    (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).
    """
    distance = sequence_mean(
        -log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), sequence, sequences
    )[sequence]
    return (advantages >= 0) | (distance <= above)
